"""Losses of transformers that count boxes or masks over all processes themselves: object detection and segmentation.

They divide a rank's sum by the mean count of a rank, which they want to compute as (count of all ranks) / (number of ranks).
But accelerate's `reduce` is already a mean unless it is told otherwise, so the count is divided twice, and the loss grows with
the number of ranks. Here it adds up. Source: transformers 5.23 `loss/loss_for_object_detection.py`, `models/mask2former`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

from accelerate.utils import operations
from torch import nn

from hf_dist.errors import ModelError

__all__ = ["let_losses_count_once"]

_LOSSES = "transformers.loss."
_SUM = functools.partial(operations.reduce, reduction="sum")
_IMAGE_LOSS = "ImageLoss"
"""The class of transformers that counts boxes; modules of other losses that derive from it import it."""


def let_losses_count_once(model: nn.Module, pipeline_stages: int) -> None:
    """Make the counts of such a loss right on several ranks. Local.

    Raises `ModelError` under a pipeline, where only the last stage computes a loss: the other stages would never take part.
    """
    counting = [module for module in _modules_of(model) if getattr(module, "reduce", None) in (operations.reduce, _SUM)]
    loss: object = getattr(model, "loss_function", None)
    its_module = sys.modules.get(getattr(loss, "__module__", None) or "")
    counts = hasattr(its_module, _IMAGE_LOSS) or any(not module.__name__.startswith(_LOSSES) for module in counting)
    if counts and pipeline_stages > 1:
        raise ModelError(
            f"pipeline.stages is above 1, and the loss of {type(model).__name__} counts boxes or masks over all processes: "
            "only those of the last stage compute it. Use ZeRO stages or tensor_parallel instead of a pipeline."
        )
    for module in counting:
        module.reduce = _SUM


def _modules_of(model: nn.Module) -> Iterator[Any]:
    """The Python modules of the classes of `model`, and of transformers' losses."""
    names = {type(part).__module__ for part in model.modules()}
    names |= {name for name in list(sys.modules) if name.startswith(_LOSSES)}
    return (sys.modules[name] for name in sorted(names) if name in sys.modules)
