"""Weights in eight bits that stay for a window: cast once, read by every microbatch, until the weights change.

A layer casts its weight in every forward and every backward, unless `Kept` has the casts. They are made before the forward
of the layer's unit, so compiled blocks get them as inputs. They take 1 byte an element with one scale per tensor, else 2
(forward and backward have scales along other axes), besides the scales.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hf_dist.config import DistConfig, settled

__all__ = ["Kept", "UnitCasts", "keeps_casts", "kept_nbytes", "product"]


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
            if not _given:
                _given.append(_make_given())
            with torch.no_grad():
                for layer in self._layers:
                    layer.kept.forward, layer.kept.backward = _casts(layer)
            self._made_of = versions

    def release(self) -> None:
        """Free the casts. Local."""
        for layer in self._layers if self._made_of is not None else ():
            layer.kept.forward = layer.kept.backward = None
        self._made_of = None

    @property
    def nbytes(self) -> int:
        """Bytes of the casts."""
        found = {id(t): t for layer in self._layers for t in (layer.kept.forward, layer.kept.backward) if t is not None}
        return sum(_nbytes(t) for t in found.values())


def keeps_casts(config: DistConfig) -> bool:
    """Whether weights are cast once for a window: it has several microbatches, and the config does not ask otherwise."""
    fp8 = config.hf_dist.fp8
    return fp8.enabled and fp8.casts == "window" and (settled(config.gradient_accumulation_steps) or 1) > 1


def kept_nbytes(shape: Sequence[int], recipe: str) -> int:
    """Bytes of the casts of a weight of this shape under torchao's `recipe`: elements, and a scale (fp32) per row or tensor."""
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


def _casts(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(for the forward, for the backward) as torchao's product makes them."""
    recipe = layer.config
    scaling: Any = importlib.import_module("torchao.float8.float8_scaling_utils")
    role = importlib.import_module("torchao.float8.float8_training_tensor").GemmInputRole.WEIGHT
    granularity = importlib.import_module("torchao.float8.config").ScalingGranularity

    def cast(how: Any, axis: int) -> torch.Tensor:
        made: torch.Tensor = scaling.hp_tensor_to_float8_dynamic(
            _transposed(layer),
            how.target_dtype,
            layer.linear_mm_config,
            gemm_input_role=role,
            scaling_granularity=how.scaling_granularity,
            axiswise_dim=axis if how.scaling_granularity is granularity.AXISWISE else None,
            round_scales_to_power_of_2=recipe.round_scales_to_power_of_2,
        )
        return made

    forward, backward = recipe.cast_config_weight, recipe.cast_config_weight_for_grad_input
    first = cast(forward, 0)
    one = forward == backward and forward.scaling_granularity is granularity.TENSORWISE
    return first, first if one else cast(backward, -1)


_given: list[Any] = []
"""torchao's product, given the casts of the weight. Made with the first cast: torch's compiler is long to import, and what it
traces must find it made."""


def _make_given() -> Any:

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: torch.Tensor, weight_t: torch.Tensor, first: Any, second: Any, mm_config: Any, recipe: Any
        ) -> torch.Tensor:
            ctx.save_for_backward(x)
            ctx.second, ctx.mm_config, ctx.recipe = second, mm_config, recipe
            own = SimpleNamespace(save_for_backward=lambda *saved: None)
            out: torch.Tensor = _torchao().forward(own, x, first, mm_config, recipe)
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            (x,) = ctx.saved_tensors
            saved = SimpleNamespace(saved_tensors=(x, ctx.second), linear_mm_config=ctx.mm_config, config=ctx.recipe)
            of_input, of_weight, *_ = _torchao().backward(saved, grad)
            return of_input, of_weight, None, None, None, None

    return torch._dynamo.allow_in_graph(Given)


def _torchao() -> Any:
    return importlib.import_module("torchao.float8.float8_linear").matmul_with_hp_or_float8_args


def product(layer: Any, x: torch.Tensor, weight_t: torch.Tensor) -> torch.Tensor:
    """`x` times the weight of a converted `layer`, (in, out), in float8 by its recipe; with the casts that are kept, if any."""
    kept: Kept = layer.kept
    if kept.forward is None:
        cast_here: torch.Tensor = _torchao().apply(x, weight_t, layer.linear_mm_config, layer.config)
        return cast_here
    made: torch.Tensor = _given[0].apply(x, weight_t, kept.forward, kept.backward, layer.linear_mm_config, layer.config)
    return made
