"""Tiny tokenizer, model folders and datasets for the libraries around the Trainer: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from datasets import Dataset

from tests.hf.recipes import SMALL, VOCAB, make_model

SPECIAL = ["<pad>", "<eos>", "<bos>"]
CHAT = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"


def tokenizer() -> Any:
    """One word is one token: `w3` to `w63`, after the special ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), VOCAB))]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = tf.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", model_max_length=64
    )
    made.chat_template = CHAT
    return made


def save_models(root: Path) -> None:
    """`root/lm` and `root/reward`, with the tokenizer beside them."""
    for name, model in (("lm", make_model("llama")), ("reward", reward_model())):
        model.save_pretrained(root / name)
        tokenizer().save_pretrained(root / name)


def save_example_models(root: Path) -> None:
    """`root/encoder` (a BERT without any head), `root/seq2seq` (T5) and `root/vision` (a ViT without a head)."""
    off: dict[str, Any] = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    torch.manual_seed(4)
    encoder = tf.BertModel(tf.BertConfig(**SMALL, **off, vocab_size=VOCAB, max_position_embeddings=32))
    vision = tf.ViTModel(tf.ViTConfig(**SMALL, **off, image_size=16, patch_size=8))
    for name, model in (("encoder", encoder), ("seq2seq", make_model("t5")), ("vision", vision)):
        model.save_pretrained(root / name)
    tokenizer().save_pretrained(root / "seq2seq")
    masking = tokenizer()
    masking.mask_token = "w63"
    masking.save_pretrained(root / "encoder")
    size = {"height": 16, "width": 16}
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "size": size,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (root / "vision" / "preprocessor_config.json").write_text(json.dumps(processor))


def save_example_data(root: Path) -> None:
    """Files as HF's examples read them: 24 rows to train on, 8 of equal length to evaluate with; and their metrics."""
    g = torch.Generator().manual_seed(7)
    (root / "text.txt").write_text("\n".join(words(20, g) for _ in range(24)))
    for suffix, count, spread in (("", 24, 4), ("_8", 8, 1)):
        sentences = [words(6 + i % spread, g) for i in range(count)]
        labelled = [{"sentence1": text, "label": i % 2} for i, text in enumerate(sentences)]
        pairs = [{"translation": {"en": text, "de": words(5, g)}} for text in sentences]
        answers = [
            {
                "id": str(i),
                "question": words(3, g),
                "context": text,
                "answers": {"text": [text.split()[2]], "answer_start": [len(" ".join(text.split()[:2])) + 1]},
            }
            for i, text in enumerate(sentences)
        ]
        for name, rows in (("labelled", labelled), ("pairs", pairs)):
            (root / f"{name}{suffix}.json").write_text("\n".join(json.dumps(row) for row in rows))
        (root / f"squad{suffix}.json").write_text(json.dumps({"data": answers}))
    _save_pictures(root / "pictures" / "train", 12, g)
    _save_pictures(root / "pictures" / "validation", 4, g)
    for name, source in METRICS.items():
        (root / name).mkdir()
        (root / name / f"{name}.py").write_text(source)


def _save_pictures(root: Path, per_class: int, g: torch.Generator) -> None:
    """Two folders of random pictures, one per class."""
    from PIL import Image

    for label in ("cats", "dogs"):
        (root / label).mkdir(parents=True)
        for i in range(per_class):
            pixels = torch.randint(0, 256, (20, 20, 3), generator=g, dtype=torch.uint8).numpy()
            Image.fromarray(pixels).save(root / label / f"{i}.png")


def _metric(features: str, compute: str) -> str:
    return f"""
import datasets
import evaluate

TEXT, NUMBER = datasets.Value("string"), datasets.Value("int32")


class Metric(evaluate.Metric):
    def _info(self):
        features = datasets.Features({features})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        pairs = list(zip(predictions, references, strict=True))
        return {compute}
"""


METRICS = {
    "accuracy": _metric(
        '{"predictions": NUMBER, "references": NUMBER}', '{"accuracy": sum(p == r for p, r in pairs) / len(pairs)}'
    ),
    "squad": _metric(
        '{"predictions": {"id": TEXT, "prediction_text": TEXT}, "references": {"id": TEXT, "answers": '
        '{"text": [TEXT], "answer_start": [NUMBER]}}}',
        '{"exact_match": sum(p["prediction_text"] in r["answers"]["text"] for p, r in pairs) / len(pairs), '
        '"f1": sum(len(p["prediction_text"]) for p, _ in pairs)}',
    ),
    "sacrebleu": _metric(
        '{"predictions": TEXT, "references": [TEXT]}',
        '{"score": sum(len(set(p.split()) & set(r[0].split())) for p, r in pairs)}',
    ),
}
"""Stand in for the metrics of those names, which `evaluate` would download."""


def reward_model() -> Any:
    """A Llama that gives one number per sequence."""
    torch.manual_seed(3)
    config = tf.LlamaConfig(**SMALL, vocab_size=VOCAB, num_key_value_heads=2, pad_token_id=0, eos_token_id=1)
    config.num_labels = 1
    return tf.LlamaForSequenceClassification(config)


def lora(task: str = "CAUSAL_LM") -> Any:
    """Adapters on every linear layer; B is not zero, so that every gradient is something."""
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type=task)


def words(count: int, generator: torch.Generator) -> str:
    """That many random words."""
    return " ".join(f"w{int(i)}" for i in torch.randint(len(SPECIAL), VOCAB, (count,), generator=generator))


def prompts(count: int) -> Dataset:
    """Prompts of 3 to 8 words."""
    g = torch.Generator().manual_seed(1)
    return Dataset.from_list([{"prompt": words(3 + i % 6, g)} for i in range(count)])


def completions(count: int) -> Dataset:
    """Prompts with completions of ragged lengths."""
    g = torch.Generator().manual_seed(2)
    rows = [{"prompt": words(2 + i % 4, g) + " ", "completion": words(3 + i % 7, g)} for i in range(count)]
    return Dataset.from_list(rows)


def preferences(count: int) -> Dataset:
    """Prompts with a chosen and a rejected completion."""
    g = torch.Generator().manual_seed(3)
    return Dataset.from_list(
        [
            {
                "prompt": words(2 + i % 4, g) + " ",
                "chosen": words(3 + i % 5, g),
                "rejected": words(2 + i % 6, g),
            }
            for i in range(count)
        ]
    )


def stored_preferences(folder: Path, count: int) -> Dataset:
    """`preferences`, in files that all ranks share."""
    from accelerate import PartialState

    with PartialState().main_process_first():
        if not folder.exists():
            preferences(count).save_to_disk(folder)
    return Dataset.load_from_disk(str(folder))
