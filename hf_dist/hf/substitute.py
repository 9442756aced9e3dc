"""Ours under the stock names, for scripts that cannot be edited: what they import after this is ours.

Classes that are ours behave like the stock ones where nobody names a config, so a script that asks for nothing gets nothing.
Libraries that derive their trainers from HF's (TRL, sentence-transformers) derive them from ours, when imported later.
"""

from __future__ import annotations

import os
import sys

import accelerate
import transformers

from hf_dist.config import LauncherSettings
from hf_dist.hf.accelerator import DistAccelerator
from hf_dist.hf.args import DistTrainingArguments, config_from_environment
from hf_dist.hf.seq2seq import DistSeq2SeqTrainer, DistSeq2SeqTrainingArguments
from hf_dist.hf.trainer import DistTrainer

__all__ = ["substitute"]

_STOCK_ACCELERATOR = accelerate.Accelerator

_STOCK: dict[type, type] = {
    transformers.Trainer: DistTrainer,
    transformers.Seq2SeqTrainer: DistSeq2SeqTrainer,
    transformers.TrainingArguments: DistTrainingArguments,
    transformers.Seq2SeqTrainingArguments: DistSeq2SeqTrainingArguments,
}


def substitute() -> None:
    """Put our classes under the stock names, for the rest of this process.

    `accelerate.Accelerator` only where HF_DIST_CONFIG or `accelerate launch` names a config: a script without a Trainer
    has no other place to name one. The Trainer keeps the stock one, and turns it into ours.
    """
    # Not the name above: transformers puts another module into its place when the first of its classes is loaded.
    package = sys.modules["transformers"]
    for stock, ours in _STOCK.items():
        for module in (package, sys.modules[stock.__module__]):
            setattr(module, stock.__name__, ours)
    if config_from_environment(LauncherSettings.from_environment(os.environ)) is not None:
        for module in (sys.modules["accelerate"], sys.modules[_STOCK_ACCELERATOR.__module__]):
            setattr(module, _STOCK_ACCELERATOR.__name__, DistAccelerator)
