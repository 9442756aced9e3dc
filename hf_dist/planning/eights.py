"""What products in float8 cost: their operations at another rate, and casts of their factors, which bf16 does not need.

Bytes that kernels read and write to cast one element of an input (x), a weight (w) or the gradient of an output (g) from bf16.
A cast finds the largest element, scales and rounds. Products of backward read factors in the other order: cast again, or
transposed.

                          fused (compiled blocks)                kernel by kernel
                          forward    backward                    forward      backward
    rowwise               x 3  w 3   x 5  w 7  g 8  result 4     x 33  w 33   x 35  w 35  g 68  result 10
    tensorwise            x 6  w 5   x 0  w 3  g 6  result 0     x 33  w 33   x 35  w 35  g 68  result 0
    rowwise_with_gw_hp    x 3  w 3   x 0  w 3  g 3  result 4     x 33  w 33   x 0   w 35  g 33  result 10
    mxfp8                 x 3  w 3   x 3  w 3  g 6  result 0     its casts are kernels of torchao: as fused

Fused: torchao's own model (`torchao/testing/training/roofline_utils.py`), with nothing fused into the kernels before. The 6
are: read for the largest element (2), read again (2), written in both orders (1 + 1). Kernel by kernel: what torchao runs
without `torch.compile`, counted: abs 4, max 2, to fp32 6, scale 8, clamp 8, to float8 5; and 2 for each transposed copy. An
input that several layers read (queries, keys, values) is cast once if fused, as the compiler sees that the casts are the same.

With a scale per row torchao multiplies by the kernel for that in forward only. Results of backward (gradients of inputs, and of
weights in float8) are of the kernel with a scale per tensor, and multiplied by their scales afterwards.

Weights that a window casts once (`float8/casts.py`) are cast in a kernel that is compiled, whatever the blocks are: 3 with a
scale per row for the forward, 5 (read twice) with one per column or per tensor. A microbatch then has their transposed copies
alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace

from hf_dist.config.sections import Fp8Config
from hf_dist.planning.hardware import Hardware

__all__ = ["IN_BF16", "NO_EIGHTS", "RECIPES", "Casts", "Cost", "Eights", "Recipe", "total"]


@dataclass(frozen=True)
class Casts:
    """Bytes per element that a layer's casts read and write in a microbatch."""

    inputs: int
    weights: int
    backward_inputs: int
    backward_weights: int
    gradients: int
    results: int = 0


@dataclass(frozen=True)
class Recipe:
    """What the layers of a model cost under one of torchao's recipes."""

    fused: Casts
    apart: Casts
    """Kernel by kernel."""
    rows: bool = True
    """Whether each row has a scale of its own."""
    weight_gradients: bool = True
    """Whether gradients of weights are products in float8; otherwise in bf16."""
    window: int = 8
    """Bytes per element of weights that are cast once for a window; 0 if they never are."""

    def rate(self, hardware: Hardware) -> float:
        """FLOP per second of forward."""
        return hardware.float8_rows if self.rows else hardware.float8

    def weight_rate(self, hardware: Hardware) -> float:
        """FLOP per second of the products that give gradients of weights."""
        return hardware.float8 if self.weight_gradients else hardware.flops


RECIPES = {
    "rowwise": Recipe(Casts(3, 3, 5, 7, 8, 4), Casts(33, 33, 35, 35, 68, 10)),
    "tensorwise": Recipe(Casts(6, 5, 0, 3, 6), Casts(33, 33, 35, 35, 68), rows=False, window=5),
    "mxfp8": Recipe(Casts(3, 3, 3, 3, 6), Casts(3, 3, 3, 3, 6), rows=False, window=0),
    "rowwise_with_gw_hp": Recipe(Casts(3, 3, 0, 3, 3, 4), Casts(33, 33, 0, 35, 33, 10), weight_gradients=False),
}


_COPY = 2
"""Bytes per element of a transposed copy."""


@dataclass(frozen=True)
class Cost:
    """Of products in float8 on some hardware."""

    recipe: Recipe
    hardware: Hardware
    fused: bool
    """Whether blocks are compiled."""
    keeps: bool = False
    """Whether a window casts weights once."""

    @classmethod
    def of(cls, section: Fp8Config, hardware: Hardware, *, fused: bool, keeps: bool = False) -> Cost | None:
        """Under the section's recipe; None if the section is off."""
        recipe = RECIPES[section.recipe]
        return cls(recipe, hardware, fused, keeps and recipe.window > 0) if section.enabled else None

    @classmethod
    def of_experts(cls, hardware: Hardware) -> Cost:
        """Of stacked experts: scales of rows under any recipe, and kernels of torchao's own for the casts."""
        return cls(RECIPES["rowwise"], hardware, fused=True)

    @property
    def casts(self) -> Casts:
        """Those of a layer in a microbatch."""
        found = self.recipe.fused if self.fused else self.recipe.apart
        return replace(found, weights=0, backward_weights=_COPY) if self.keeps else found

    def forward(self, eights: Eights) -> float:
        """Seconds of a forward."""
        return eights.flops / self.recipe.rate(self.hardware) + self.casting(eights)

    def window(self, eights: Eights) -> float:
        """Seconds of the casts that a window makes once."""
        return self.recipe.window * eights.weights / self.hardware.memory if self.keeps else 0.0

    def casting(self, eights: Eights) -> float:
        """Seconds of the casts of a forward."""
        return (self.casts.inputs * self._cast(eights) + self.casts.weights * eights.weights) / self.hardware.memory

    def _cast(self, eights: Eights) -> int:
        """Elements of inputs that are cast."""
        return eights.distinct if self.fused else eights.inputs

    def backward(self, eights: Eights) -> float:
        """Seconds of the gradients of inputs and of weights."""
        casts = self.casts
        nbytes = casts.backward_inputs * self._cast(eights) + casts.backward_weights * eights.weights
        nbytes += casts.gradients * eights.outputs
        nbytes += casts.results * (eights.inputs + (eights.weights if self.recipe.weight_gradients else 0))
        products = eights.flops / self.hardware.float8 + eights.flops / self.recipe.weight_rate(self.hardware)
        return products + nbytes / self.hardware.memory


IN_BF16 = Fp8Config()
"""The section where nothing is in float8."""


@dataclass(frozen=True)
class Eights:
    """The products of layers that multiply in float8, in one forward or a part of it."""

    flops: int = 0
    inputs: int = 0
    """Elements of the layers' inputs."""
    distinct: int = 0
    """The same, each tensor once."""
    weights: int = 0
    outputs: int = 0
    """Elements of their outputs."""

    def scaled(self, factor: float) -> Eights:
        """With `factor` times the rows."""
        flops, inputs, distinct, outputs = (
            round(factor * count) for count in (self.flops, self.inputs, self.distinct, self.outputs)
        )
        return Eights(flops, inputs, distinct, self.weights, outputs)


NO_EIGHTS = Eights()


def total(parts: Iterable[Eights]) -> Eights:
    """The sum of all parts."""
    rows = [astuple(part) for part in parts]
    return Eights(*map(sum, zip(*rows, strict=True)))
