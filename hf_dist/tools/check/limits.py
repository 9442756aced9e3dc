"""How far a layout may be from one process; in half precision, as far as its distance from fp32 makes likely."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["DRAWN", "FP32", "Limits", "limits", "relative", "wider"]

FP32 = 1e-5
"""Largest relative difference in fp32."""
TENSOR = 2.0
"""In 28 right layouts of six families in bf16 the farthest tensor was at 1.6 times its distance (2.2 with cut matrices)."""
DRAWN = 4.0
"""A layout rounds in its own way, and another draw of one process is one sample of what that does to a model."""
STUDENT = {3: 12.9, 4: 8.6, 5: 6.9, 6: 6.0, 7: 5.4, 8: 5.0, 10: 4.6, 20: 3.9}
"""Steps -> multiple of the rms of so many samples that another sample exceeds once in a thousand times (Student's t)."""


@dataclass(frozen=True)
class Limits:
    """Largest relative differences."""

    losses: float
    norms: float
    tensors: list[float]
    """By step; of any tensor."""
    own: list[Mapping[str, float]] = field(default_factory=list)
    """By step; of one tensor, where that is less."""
    routed: float = 0.0
    """Of tensors beside a router, at any step; more than that of others, or 0."""
    beside_router: Collection[str] = ()
    """Names of those tensors."""

    outputs: Mapping[str, float] = field(default_factory=dict)
    """Of each output of the model."""
    drawn: Mapping[str, float] = field(default_factory=dict)
    """Of each tensor and output, whatever the others say: `DRAWN` times its distance in another draw of rounding."""
    evaluation: float = 0.0
    """Of the loss of an evaluation, where that is more than `losses`. It comes after all steps, and small losses are far apart
    relative to themselves."""

    def of_output(self, name: str) -> float:
        """For one output of the model."""
        return max(self.outputs.get(name, FP32), self.routed, self.drawn.get(name, 0.0))

    def of(self, name: str, step: int = -1) -> float:
        """For one tensor after a step."""
        routed = self.routed if name in self.beside_router else 0.0
        own = self.own[step].get(name, math.inf) if self.own else math.inf
        return max(min(self.tensors[step], own), routed, self.drawn.get(name, 0.0))


def limits(
    plain: Mapping[str, Any],
    same: Mapping[str, Any] | None,
    steps: int,
    *,
    cut: bool,
    routed: Collection[Collection[str]] = (),
) -> Limits:
    """`plain`, `same`: `losses`, `norms` and, if there was one, `evaluation` of one process in fp32 and in the layout's
    precision, None if that is fp32; `same` has the `differences` of its tensors from `plain` by step, too. `cut`: whether the
    layout cuts matrices. `routed`: names of the experts' and the router's tensors, by layer, if one sample does not tell how
    many tokens change their expert.

    Both the layout and one process round, and variances add. Where matrices are cut, each part of a sum is rounded, and the
    sum: three times the variance. A tensor's distance is a sum over many roundings, and one sample tells that of the worst
    tensor. Another tensor's may be small by chance, so `TENSOR` times the largest of its own after any step counts, or the
    median of all. Not so beside a router: now and then rounding sends one token to another expert, in one run and not in the
    other. The worst tensor of each layer after each step is a sample of that. In bf16 many tokens change, so that one sample
    mostly tells their number: the caller names no routers until something differs.
    """
    if same is None:
        return Limits(FP32, FP32, [FP32] * steps)
    apart = math.sqrt(1 + (3 if cut else 1))
    found = same["differences"]
    choices = [max(after[name] for name in names) for after in found for names in routed]
    return Limits(
        max(FP32, apart * _likely(_distances(plain["losses"], same["losses"]))),
        max(FP32, apart * _likely(_distances(plain["norms"], same["norms"]))),
        [max(FP32, apart * max(after.values())) for after in found],
        [_of_each(after, found, TENSOR * apart) for after in found],
        apart * _likely(choices) if choices else 0.0,
        frozenset(name for names in routed for name in names),
        _of_each(same.get("outputs", {}), [same.get("outputs", {})], TENSOR * apart),
        evaluation=TENSOR
        * apart
        * relative(*([run["evaluation"]] if "evaluation" in run else [] for run in (plain, same))),
    )


def wider(found: Limits, expected: Mapping[str, Any], other: Mapping[str, Any]) -> Limits:
    """`found`, or as far as one process in `expected` is from one that rounds otherwise (`rounding.py`), `DRAWN` times.

    A tensor with few elements (a bias of two classes) or an output may be near by chance: the median of all counts, too, and
    in half precision how far its own distances after each step make likely.
    """
    tensors = dict(found.drawn)
    for after in (other["outputs"], expected.get("outputs", {}), *other["differences"]):
        least = statistics.median(after.values() or (0.0,))
        for name, value in after.items():
            tensors[name] = max(tensors.get(name, 0.0), DRAWN * max(value, least))
    for name in expected["differences"][0] if "differences" in expected else ():
        likely = _likely([after[name] for after in expected["differences"]])
        tensors[name] = max(tensors.get(name, 0.0), likely)
    return replace(
        found,
        losses=max(found.losses, DRAWN * max(_distances(expected["losses"], other["losses"]))),
        evaluation=max(found.evaluation, DRAWN * relative([expected["evaluation"]], [other["evaluation"]])),
        norms=max(found.norms, DRAWN * max(_distances(expected["norms"], other["norms"]))),
        drawn=tensors,
    )


def _of_each(after: Mapping[str, float], steps: Sequence[Mapping[str, float]], factor: float) -> dict[str, float]:
    least = statistics.median(after.values() or (0.0,))
    return {name: max(FP32, factor * max(least, *(found[name] for found in steps))) for name in after}


def relative(expected: Sequence[float], got: Sequence[float]) -> float:
    """The largest relative difference between numbers; infinite where one is not finite."""
    pairs = list(zip(expected, got, strict=False))
    return max((abs(b - a) / (abs(a) or 1.0) if math.isfinite(b) else math.inf for a, b in pairs), default=math.inf)


def _distances(plain: Sequence[float], same: Sequence[float]) -> list[float]:
    return [relative([a], [b]) for a, b in zip(plain, same, strict=True)]


def _likely(samples: Sequence[float]) -> float:
    """The largest distance that is likely, from some."""
    factor = STUDENT[max(n for n in STUDENT if n <= max(len(samples), min(STUDENT)))]
    return factor * math.sqrt(sum(value**2 for value in samples) / len(samples))
