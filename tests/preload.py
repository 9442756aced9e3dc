"""Imported once by the fork server of `tests/harness.py`, so that ranks start with everything loaded."""

import importlib

import torch

torch.set_num_threads(1)

for name in ("bert", "gpt2", "llama", "qwen3", "qwen3_moe", "t5", "vit"):
    importlib.import_module(f"transformers.models.{name}.modeling_{name}")
importlib.import_module("peft")
importlib.import_module("hf_dist.build")
