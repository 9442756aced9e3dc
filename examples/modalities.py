"""One script, six modalities: images, speech, image and text, translation, tags of tokens, and rewards from pairs.

    torchrun --nproc_per_node 2 examples/modalities.py --task vision --dist_config configs/zero3.json --use_cpu

The layout comes from the same JSON as for text. Models are small and random and data are made up, so that it needs no download:
replace `small_...` by `from_pretrained` and `rows_of` by your dataset and its processor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers import HfArgumentParser, set_seed

from hf_dist import DistTrainer, DistTrainingArguments

VOCABULARY, WIDTH, LENGTH, IMAGE, MELS = 64, 32, 12, 16, 16
IMAGE_TOKEN, NUM_PATCHES = VOCABULARY - 1, 4
TEXT = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
TEXT |= {"num_attention_heads": 4}
EDGES = {"image_size": IMAGE, "patch_size": IMAGE // 2, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
EDGES |= {"num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
"""Then one and two processes give the same numbers."""


def small_vision() -> nn.Module:
    """Image classification: ViT."""
    return hf.ViTForImageClassification(hf.ViTConfig(**EDGES, num_labels=4))


def small_speech() -> nn.Module:
    """Transcription: Whisper."""
    sizes = {"d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": MELS}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    lengths = {"max_source_positions": LENGTH, "max_target_positions": LENGTH, "decoder_start_token_id": 1}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sizes, **heads, **tokens, **lengths))


def small_image_text() -> nn.Module:
    """A chat model that sees images: Llava."""
    vision, text = hf.CLIPVisionConfig(**EDGES), hf.LlamaConfig(**TEXT)
    return hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN, vision_feature_layer=-1)
    )


def small_seq2seq() -> nn.Module:
    """Translation, summaries: T5."""
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))


def small_tokens() -> nn.Module:
    """A tag for each token, as for names: BERT."""
    return hf.BertForTokenClassification(hf.BertConfig(**TEXT, **NO_DROPOUT, num_labels=4))


def small_reward() -> nn.Module:
    """One number for a text: a Llama with a score. TRL's RewardTrainer works, too; here the loss of a pair is written out."""
    return hf.LlamaForSequenceClassification(hf.LlamaConfig(**TEXT, num_labels=1, pad_token_id=0))


MODELS = {
    "vision": small_vision,
    "speech": small_speech,
    "image_text": small_image_text,
    "seq2seq": small_seq2seq,
    "tokens": small_tokens,
    "reward": small_reward,
}
"""Task -> its model."""


def rows_of(task: str, count: int) -> list[dict[str, Any]]:
    """Made-up rows, the same on every rank: what is asked for can be read from the inputs."""
    random = torch.Generator().manual_seed(0)
    rows = []
    for number in range(count):
        label = number % 4
        ids = torch.randint(4, VOCABULARY - 1, (LENGTH,), generator=random)
        image = torch.randn(3, IMAGE, IMAGE, generator=random) + label
        if task == "vision":
            rows.append({"pixel_values": image, "labels": label})
        elif task == "speech":
            sound = torch.randn(MELS, 2 * LENGTH, generator=random) + label
            rows.append({"input_features": sound, "labels": torch.full((LENGTH,), 4 + label)})
        elif task == "image_text":
            text = torch.cat((torch.full((NUM_PATCHES,), IMAGE_TOKEN), torch.full((LENGTH,), 4 + label)))
            labels = text.masked_fill(text == IMAGE_TOKEN, -100)
            rows.append({"pixel_values": image, "input_ids": text, "labels": labels})
        elif task == "seq2seq":
            rows.append({"input_ids": ids, "labels": ids.flip(0)})
        elif task == "tokens":
            rows.append({"input_ids": ids, "labels": ids % 4})
        else:
            rows.append({"chosen": ids.sort().values, "rejected": ids})
    return rows


class RewardTrainer(DistTrainer):
    """The chosen text of a pair is to have the higher reward."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """Bradley-Terry: -log sigmoid(reward of the chosen - reward of the rejected), the mean of the rows."""
        output = model(input_ids=torch.cat((inputs["chosen"], inputs["rejected"])))
        chosen, rejected = output.logits.squeeze(-1).chunk(2)
        loss = -nn.functional.logsigmoid(chosen - rejected).mean()
        return (loss, output) if return_outputs else loss


@dataclass
class ExampleArguments:
    """What to train."""

    task: str = field(default="vision", metadata={"help": f"One of {', '.join(MODELS)}.", "choices": list(MODELS)})
    num_rows: int = field(default=64, metadata={"help": "Made-up rows."})


def main() -> None:
    """Evaluate, train, evaluate again, save."""
    parser = HfArgumentParser((ExampleArguments, DistTrainingArguments))
    parser.set_defaults(output_dir="runs/modalities", learning_rate=5e-3, per_device_train_batch_size=8)
    parser.set_defaults(max_steps=30, logging_steps=10, save_strategy="no", remove_unused_columns=False)
    example, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    rows = rows_of(example.task, example.num_rows)
    kind = RewardTrainer if example.task == "reward" else DistTrainer
    args.prediction_loss_only = True
    args.label_names = ["chosen"] if example.task == "reward" else None  # what the loss is made of
    trainer = kind(model=MODELS[example.task](), args=args, train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"{example.task}: loss before: {before.get('eval_loss', 0):.3f}  after: {after.get('eval_loss', 0):.3f}")


if __name__ == "__main__":
    main()
