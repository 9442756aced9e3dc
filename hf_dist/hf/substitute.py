"""Puts hf_dist's classes under the stock names, for scripts that cannot be edited: later imports get these classes.

Without a config the classes behave like the stock ones, so a script that asks for nothing is unchanged. Libraries that
derive their trainers from HF's (TRL, sentence-transformers) derive them from hf_dist's, if imported later.
"""

from __future__ import annotations

import os
import sys

import accelerate
import transformers
from transformers.integrations import deepspeed as deepspeed_names

from hf_dist.config import LauncherSettings, load_config
from hf_dist.hf.accelerator import DistAccelerator
from hf_dist.hf.args import DistTrainingArguments, config_from_environment
from hf_dist.hf.deepspeed_config import HfDeepSpeedConfig
from hf_dist.hf.distributed_config import take_always
from hf_dist.hf.roles import enter
from hf_dist.hf.seq2seq import DistSeq2SeqTrainer, DistSeq2SeqTrainingArguments
from hf_dist.hf.trainer import DistTrainer

__all__ = ["divide_into_roles", "substitute"]

_STOCK_ACCELERATOR = accelerate.Accelerator

_STOCK: dict[type, type] = {
    transformers.Trainer: DistTrainer,
    transformers.Seq2SeqTrainer: DistSeq2SeqTrainer,
    transformers.TrainingArguments: DistTrainingArguments,
    transformers.Seq2SeqTrainingArguments: DistSeq2SeqTrainingArguments,
}


def substitute() -> None:
    """Replace the stock classes for the rest of this process.

    `accelerate.Accelerator` is replaced only if HF_DIST_CONFIG or `accelerate launch` names a config, because a script without
    a Trainer has no other place for one. The Trainer creates the stock accelerator, which is then adopted.
    """
    take_always()
    # Not the name imported above: transformers replaces its module object when the first class is loaded.
    package = sys.modules["transformers"]
    for stock, ours in _STOCK.items():
        for module in (package, sys.modules[stock.__module__]):
            setattr(module, stock.__name__, ours)
    for module in (sys.modules["transformers.integrations"], deepspeed_names):
        module.HfDeepSpeedConfig = HfDeepSpeedConfig  # type: ignore[attr-defined]
    if config_from_environment(LauncherSettings.from_environment(os.environ)) is not None:
        for module in (sys.modules["accelerate"], sys.modules[_STOCK_ACCELERATOR.__module__]):
            setattr(module, _STOCK_ACCELERATOR.__name__, DistAccelerator)


def divide_into_roles() -> None:
    """Serve at once in the ranks of roles with a model, if the environment names a config with roles: no script runs there."""
    launcher = LauncherSettings.from_environment(os.environ)
    source = config_from_environment(launcher)
    if source is not None:
        enter(load_config(source, launcher=launcher))
