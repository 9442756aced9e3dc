"""Weights in eight bits that stay for a window: cast once, read by every microbatch, until the weights change.

A layer casts its weight in every forward and every backward, unless `Kept` has the casts. They are made before the forward
of the layer's unit, so compiled blocks get them as inputs. They take 1 byte an element with one scale per tensor, else 2
(forward and backward have scales along other axes), besides the scales.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_dist.config import DistConfig, settled
from hf_dist.float8.product import weight_casts
from hf_dist.tensors.one_kernel import one_kernel

__all__ = ["Kept", "UnitCasts", "keeps_casts", "kept_nbytes"]


@dataclasses.dataclass(eq=False)
class Kept:
    """The casts of one layer's weight. Copies of a prepared model have stock layers, without them (`sharding/pickled.py`)."""

    forward: torch.Tensor | None = None
    """torchao's tensor of (in, out), for the product of the forward; None: the layer casts."""
    backward: torch.Tensor | None = None
    """For the gradient of the input; the same object where one scale serves both."""


class UnitCasts:
    """The casts of the layers of one unit."""

    def __init__(self, layers: Sequence[Any], versions: Callable[[], object]) -> None:
        """`layers`: converted ones; `versions`: another value whenever their weights have changed, None while they come and go
        with each use."""
        self._layers = layers
        self._versions = versions
        self._made_of: object = None

    def renew(self) -> None:
        """Make the casts of the weights of now, which must be readable, unless they exist. Local; before a forward."""
        versions = self._versions()
        if versions is not None and versions == self._made_of:
            return
        self.release()
        if versions is not None and torch.is_grad_enabled():  # an evaluation reads each weight once
            with torch.no_grad():
                for layer in self._layers:
                    made = one_kernel(weight_casts, _transposed(layer), layer.config, layer.linear_mm_config)
                    layer.kept.forward, layer.kept.backward = made
            self._made_of = versions

    def release(self) -> None:
        """Free the casts. Local."""
        for layer in self._layers:  # of those, too, that were made before one failed
            layer.kept.forward = layer.kept.backward = None
        self._made_of = None

    @property
    def nbytes(self) -> int:
        """Bytes of the casts."""
        found = {id(t): t for layer in self._layers for t in (layer.kept.forward, layer.kept.backward) if t is not None}
        return sum(_nbytes(t) for t in found.values())


def keeps_casts(config: DistConfig) -> bool:
    """Whether weights are cast once for a window: it has several microbatches, and the config does not ask otherwise.

    torchao's MXFP8 casts by itself."""
    fp8 = config.hf_dist.fp8
    several = (settled(config.gradient_accumulation_steps) or 1) > 1
    return fp8.enabled and fp8.recipe != "mxfp8" and fp8.casts == "window" and several


def kept_nbytes(shape: Sequence[int], recipe: str) -> int:
    """Bytes of the casts of a weight of this shape under torchao's `recipe`: elements, and a scale (fp32) per row or tensor.

    0 for a stack: torchao's grouped product casts by itself."""
    if len(shape) > 2:
        return 0
    numel = math.prod(shape)
    if recipe == "tensorwise":
        return numel + 4
    scales = shape[0] + 1 if recipe == "rowwise_with_gw_hp" else sum(shape)
    return 2 * numel + 4 * scales


def _nbytes(cast: Any) -> int:
    parts = (cast._data, cast._scale)
    return sum(part.numel() * part.element_size() for part in parts)


def _transposed(layer: Any) -> torch.Tensor:
    weight: torch.Tensor = layer.weight
    return weight.t() if isinstance(layer, nn.Linear) else weight
