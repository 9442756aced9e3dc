"""Imported once by the fork server of `tests/harness.py`, so that ranks start with everything loaded."""

import importlib

import torch

from tests import garbage

torch.set_num_threads(1)

for name in ("bert", "gpt2", "llama", "qwen3", "qwen3_moe", "t5", "vit"):
    importlib.import_module(f"transformers.models.{name}.modeling_{name}")
# What most ranks import first: two thirds of a second each. Not TRL, whose classes must come after `hf_dist.run` has begun.
for name in ("peft", "hf_dist.build", "hf_dist.hf", "transformers.trainer", "tests.hf.on_ranks"):
    importlib.import_module(name)
# A collection of garbage in a rank (one per Trainer, and those of Python) does not go through a million objects, nor copies
# the pages they are on.
garbage.settle()
