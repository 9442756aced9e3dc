"""Shard stock Hugging Face models inside the Trainer, or in one's own loop, from a DeepSpeed-style JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_dist.build import initialize
    from hf_dist.engine import Engine
    from hf_dist.hf import (
        DistAccelerator,
        DistArgsMixin,
        DistSeq2SeqTrainer,
        DistSeq2SeqTrainingArguments,
        DistTrainer,
        DistTrainerMixin,
        DistTrainingArguments,
    )
    from hf_dist.hf.loading import from_pretrained
    from hf_dist.sharding.gather import gathered

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
    "gathered",
    "initialize",
]

# Imported on first use: `hf-dist config` and tests of pure parts should not pay for importing transformers.
_WHERE = {
    "DistAccelerator": "hf_dist.hf",
    "DistArgsMixin": "hf_dist.hf",
    "DistSeq2SeqTrainer": "hf_dist.hf",
    "DistSeq2SeqTrainingArguments": "hf_dist.hf",
    "DistTrainer": "hf_dist.hf",
    "DistTrainerMixin": "hf_dist.hf",
    "DistTrainingArguments": "hf_dist.hf",
    "Engine": "hf_dist.engine",
    "from_pretrained": "hf_dist.hf.loading",
    "gathered": "hf_dist.sharding.gather",
    "initialize": "hf_dist.build",
}


# Knows how HF models are written; an engine made without the Trainer needs it as well.
_NEEDS = {"initialize": "hf_dist.hf.model_files"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'hf_dist' has no attribute {name!r}")
    import importlib

    if name in _NEEDS:
        importlib.import_module(_NEEDS[name])
    return getattr(importlib.import_module(_WHERE[name]), name)
