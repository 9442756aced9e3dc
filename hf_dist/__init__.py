"""Shards stock Hugging Face models inside the Trainer or your own loop, configured by a DeepSpeed-style JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_dist.engine.build import initialize
    from hf_dist.engine.engine import Engine
    from hf_dist.engine.unprepare import unprepare
    from hf_dist.hf.accelerator import DistAccelerator
    from hf_dist.hf.args import DistArgsMixin, DistTrainingArguments
    from hf_dist.hf.loading import from_pretrained
    from hf_dist.hf.remote_call import remote_call
    from hf_dist.hf.remote_loss import remote_loss
    from hf_dist.hf.roles import remote_model
    from hf_dist.hf.seq2seq import DistSeq2SeqTrainer, DistSeq2SeqTrainingArguments
    from hf_dist.hf.trainer import DistTrainer, DistTrainerMixin
    from hf_dist.sharding.full_params import full_gradient, full_shape, gathered

from hf_dist.version import __version__ as __version__

__all__ = [
    "DistAccelerator",
    "DistArgsMixin",
    "DistSeq2SeqTrainer",
    "DistSeq2SeqTrainingArguments",
    "DistTrainer",
    "DistTrainerMixin",
    "DistTrainingArguments",
    "Engine",
    "from_pretrained",
    "full_gradient",
    "full_shape",
    "gathered",
    "initialize",
    "remote_call",
    "remote_loss",
    "remote_model",
    "unprepare",
]

# Imported on first use: a custom loop should not pay for the Trainer (1 s and 100 MB, mostly `datasets` and pandas), nor
# `hf-dist config` for transformers.
_WHERE = {
    "DistAccelerator": "hf_dist.hf.accelerator",
    "DistArgsMixin": "hf_dist.hf.args",
    "DistSeq2SeqTrainer": "hf_dist.hf.seq2seq",
    "DistSeq2SeqTrainingArguments": "hf_dist.hf.seq2seq",
    "DistTrainer": "hf_dist.hf.trainer",
    "DistTrainerMixin": "hf_dist.hf.trainer",
    "DistTrainingArguments": "hf_dist.hf.args",
    "Engine": "hf_dist.engine.engine",
    "from_pretrained": "hf_dist.hf.loading",
    "full_gradient": "hf_dist.sharding.full_params",
    "full_shape": "hf_dist.sharding.full_params",
    "gathered": "hf_dist.sharding.full_params",
    "initialize": "hf_dist.engine.build",
    "remote_call": "hf_dist.hf.remote_call",
    "remote_loss": "hf_dist.hf.remote_loss",
    "remote_model": "hf_dist.hf.roles",
    "unprepare": "hf_dist.engine.unprepare",
}


# This package knows how HF models are saved; an engine without the Trainer needs it too.
_NEEDS = {"initialize": "hf_dist.hf"}


def __dir__() -> list[str]:
    return [*__all__, "__version__"]  # what `dir`, `help` and TAB show, also of names that are not imported yet


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'hf_dist' has no attribute {name!r}")
    import importlib

    if name in _NEEDS:
        importlib.import_module(_NEEDS[name])
    return getattr(importlib.import_module(_WHERE[name]), name)
