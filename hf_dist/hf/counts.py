"""How many parameters a model has, where each rank holds a slice or a stage of it: what HF's own counts should say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import transformers.trainer
from torch import nn

from hf_dist.sharding.counts import elements
from hf_dist.sharding.ownership import shards_of

__all__ = ["parameter_count", "whole_counts"]

_COUNT = "get_model_param_count"


def parameter_count(model: nn.Module, trainable_only: bool = False) -> int:
    """Elements of all parameters of `model`, those of other ranks included. Any rank may call it alone.

    Source: transformers `trainer_pt_utils.get_model_param_count`, which counts this rank's elements only.
    """
    sharded = shards_of(model)
    return elements(model if sharded is None else sharded.whole, trainable_only)


@contextmanager
def whole_counts() -> Iterator[None]:
    """Inside, the line "Number of trainable parameters" of HF's loop is of the whole model."""
    if not hasattr(transformers.trainer, _COUNT):
        yield
        return

    def count(model: Any, trainable_only: bool = False) -> int:
        return parameter_count(model, trainable_only)

    with mock.patch.object(transformers.trainer, _COUNT, count):
        yield
