"""A folder with a small Llama and its tokenizer, and texts to fine-tune it on: for examples that start from a checkpoint.

Made from the sources and docstrings of the Python standard library, without a download. The weights are random, so the
examples show how something is done, not how well. For good results pass --model_name_or_path.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from stdlib_docstrings import examples
from train_clm import ExampleArguments, make_tokenizer, read_texts, small_llama
from transformers import AutoTokenizer

NUM_PACKAGES = 4


def small_causal_lm(folder: Path) -> str:
    """The folder, after one process has written model and tokenizer into it. Every process calls it."""
    with PartialState().main_process_first():
        return write_small_causal_lm(folder)


def write_small_causal_lm(folder: Path) -> str:
    """The folder, with model and tokenizer. If several processes start together, one must call it first."""
    if not (folder / "config.json").exists():
        sources = read_texts(ExampleArguments(max_characters=200_000), seed=0)
        make_tokenizer(sources, 1024, folder)
        with torch.random.fork_rng():  # else the writing process would draw other adapters than the rest
            small_llama(AutoTokenizer.from_pretrained(folder), block_size=128).save_pretrained(folder)
    return str(folder)


def described_packages(split: str, max_per_package: int) -> Dataset:
    """Rows {prompt, completion}: the name of a package, and one of its docstrings; the same in every process."""
    rows = examples(split, NUM_PACKAGES, max_per_package, 0, sys.version)
    return Dataset.from_list([{"prompt": f"{r['package']}: ", "completion": r["text"]} for r in rows])


def preferred_descriptions(split: str, max_per_package: int) -> Dataset:
    """Rows {prompt, chosen, rejected}: the docstring of the package itself, and one of another package."""
    rows = list(examples(split, NUM_PACKAGES, max_per_package, 0, sys.version))
    others = [next(o for o in (*rows[i:], *rows) if o["package"] != row["package"]) for i, row in enumerate(rows)]
    return Dataset.from_list(
        [
            {"prompt": f"{row['package']}: ", "chosen": row["text"], "rejected": other["text"]}
            for row, other in zip(rows, others, strict=True)
        ]
    )
