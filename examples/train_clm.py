"""Train or fine-tune any causal language model on a folder of text.

    accelerate launch --num_processes 2 examples/train_clm.py --dist_config configs/zero3.json --max_steps 200

Without --model_name_or_path it creates a small Llama and a byte-level BPE tokenizer; without --text_dir it
reads the sources of the Python standard library. Nothing is downloaded.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from datasets import Dataset, DatasetDict
from stdlib_docstrings import stdlib_sources
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    default_data_collator,
    set_seed,
)

from hf_dist import DistTrainer, DistTrainingArguments

TEXT_SUFFIXES = {".txt", ".md", ".rst", ".py"}
END_OF_TEXT = "<|endoftext|>"
EVAL_SHARE = 0.05


@dataclass
class ExampleArguments:
    """Which model, which text."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A checkpoint to fine-tune; default: a small Llama from scratch."}
    )
    text_dir: str | None = field(
        default=None, metadata={"help": "Folder of .txt, .md, .rst and .py files; default: the standard library."}
    )
    max_characters: int = field(default=2_000_000, metadata={"help": "How much of the text to use."})
    block_size: int = field(default=128, metadata={"help": "Tokens per example."})
    vocab_size: int = field(default=4096, metadata={"help": "Vocabulary size of the new tokenizer."})
    prompt: str = field(default="def ", metadata={"help": "Start of the text generated at the end."})
    sample_tokens: int = field(default=48, metadata={"help": "Length of the text generated at the end."})


def read_texts(example: ExampleArguments, seed: int) -> list[str]:
    """The files in a seeded order, up to the requested number of characters; the same in every process."""
    if example.text_dir is None:
        paths = stdlib_sources()
    else:
        paths = sorted(path for path in Path(example.text_dir).rglob("*") if path.suffix in TEXT_SUFFIXES)
    random.Random(seed).shuffle(paths)
    texts, room = [], example.max_characters
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")[:room]
        room -= len(text)
        texts += [text] if text.strip() else []
        if room <= 0:
            break
    if len(texts) < 2:
        sys.exit(f"{len(texts)} files with text in {example.text_dir}; at least 2 are needed, one for evaluation.")
    return texts


def make_tokenizer(texts: list[str], vocab_size: int, folder: Path) -> None:
    """Train a byte-level BPE tokenizer and save it."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
    tokenizer.save_pretrained(folder)


def to_blocks(texts: list[str], tokenizer: PreTrainedTokenizerBase, block_size: int) -> Dataset:
    """The texts, joined and cut into blocks of exactly `block_size` tokens."""

    def tokenize(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = tokenizer(rows["text"], verbose=False)["input_ids"]
        joined = list(chain.from_iterable([*document, tokenizer.eos_token_id] for document in ids))
        starts = range(0, len(joined) - block_size + 1, block_size)
        blocks = [joined[start : start + block_size] for start in starts]
        return {"input_ids": blocks, "labels": blocks}  # the model shifts the labels itself

    return Dataset.from_dict({"text": texts}).map(tokenize, batched=True, batch_size=None, remove_columns="text")


def prepare_data(texts: list[str], tokenizer: PreTrainedTokenizerBase, block_size: int) -> DatasetDict:
    """Train and eval blocks, from different files."""
    num_eval = max(1, round(EVAL_SHARE * len(texts)))
    return DatasetDict(
        train=to_blocks(texts[num_eval:], tokenizer, block_size),
        eval=to_blocks(texts[:num_eval], tokenizer, block_size),
    )


def small_llama(tokenizer: PreTrainedTokenizerBase, block_size: int) -> PreTrainedModel:
    """A Llama of about 5M parameters with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max(2048, block_size),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(config)


def sample(trainer: DistTrainer, tokenizer: PreTrainedTokenizerBase, example: ExampleArguments) -> str:
    """Text the model writes after the prompt. Every process must call it: the weights are sharded over all processes.

    Greedy and of a fixed length, so that all processes make the same number of forwards.
    """
    inputs = tokenizer(example.prompt, return_tensors="pt", return_token_type_ids=False).to(trainer.args.device)
    length = {"min_new_tokens": example.sample_tokens, "max_new_tokens": example.sample_tokens}
    output = trainer.model.eval().generate(**inputs, **length, do_sample=False, repetition_penalty=1.2)
    return tokenizer.decode(output[0], skip_special_tokens=True)


def parse_arguments(output_dir: str = "runs/clm") -> tuple[ExampleArguments, DistTrainingArguments]:
    """The command line; accepts every field of TrainingArguments; these defaults suit the small model.

    `output_dir`: where it is saved if the command line does not say.
    """
    parser = HfArgumentParser((ExampleArguments, DistTrainingArguments))
    parser.set_defaults(
        output_dir=output_dir,
        learning_rate=1e-3,
        warmup_steps=10,
        per_device_train_batch_size=8,
        num_train_epochs=1,
        logging_steps=10,
        save_strategy="no",
    )
    return parser.parse_args_into_dataclasses()


def main() -> None:
    """Evaluate, train, evaluate again, save, write a sample."""
    example, args = parse_arguments()
    set_seed(args.seed)
    texts = read_texts(example, args.seed)
    tokenizer_path = example.model_name_or_path or Path(args.output_dir, "tokenizer")
    with args.main_process_first(desc="making the tokenizer"):
        if example.model_name_or_path is None and args.local_process_index == 0:
            make_tokenizer(texts, example.vocab_size, tokenizer_path)
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    data = prepare_data(texts, tokenizer, example.block_size)
    if example.model_name_or_path:
        model = AutoModelForCausalLM.from_pretrained(example.model_name_or_path)
    else:
        model = small_llama(tokenizer, example.block_size)
    trainer = DistTrainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["eval"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    text = sample(trainer, tokenizer, example)
    if trainer.is_world_process_zero():
        print(f"{len(data['train'])} blocks of {example.block_size} tokens for training, {len(data['eval'])} held out")
        print(f"perplexity before: {math.exp(before):.1f}  after: {math.exp(after):.1f}")
        print(f"sample: {text!r}")
        print(f"saved to {args.output_dir}")


if __name__ == "__main__":
    main()
