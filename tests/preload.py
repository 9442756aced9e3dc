"""Imported once by the fork server of `tests/harness.py`, so that ranks start with everything loaded."""

import importlib

import torch
import transformers.conversion_mapping

from tests import garbage

torch.set_num_threads(1)

for name in ("bert", "gpt2", "llama", "qwen3", "qwen3_moe", "t5", "vit"):
    importlib.import_module(f"transformers.models.{name}.modeling_{name}")
# What most ranks import first: two thirds of a second each. Not TRL, whose classes must come after `hf_dist.run` has begun.
for name in ("peft", "hf_dist.engine.build", "hf_dist.hf", "transformers.trainer", "tests.hf.on_ranks"):
    importlib.import_module(name)
# transformers compiles some eight hundred patterns of names, once per process.
transformers.conversion_mapping.get_checkpoint_conversion_mapping("llama")
# Without a GPU, `torch.manual_seed` keeps the stack of each call for the day when there is one.
if not torch.cuda.is_available():
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda seed: None
# A collection of garbage in a rank (one per Trainer, and those of Python) does not go through a million objects, nor copies
# the pages they are on.
garbage.settle()
