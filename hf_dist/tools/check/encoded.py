"""Encoded messages in one process: what each data rank's gradient and every weight become on their way, without an engine.

    before a forward    a parameter is what arrives of its master
    after a backward    its gradient is that of one data rank, as if this rank were alone
    before a step       the gradient is the mean of what arrives of all ranks' gradients, in the hops of the layout

A codec's blocks begin at parameters, so no layout of the flat buffers is needed. Where a rank's message is a part of a gradient
(slices, parts of a sequence, experts, weights that several stages hold), one process does not have it, and the layout is
compared without codecs.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_dist.config import axes_of, load_config
from hf_dist.sharding.placement import Placement, placements_for
from hf_dist.sharding.wires import Wires
from hf_dist.tensors.codecs import Codec
from hf_dist.tools.check.data import IGNORED, Batch, joined

__all__ = ["Counts", "Encoding", "Messages", "counts_of", "encoding_of", "in_fp32"]

Counts = Callable[[Sequence[Batch]], list[int] | None]
"""What each loss of a window is multiplied by, to be divided by their sum; None for losses that are to be added up."""
_KEYS = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
_HALF = ("bf16", "fp16", "communication_data_type", "data_types")


@dataclass(frozen=True)
class Encoding:
    """What travels in which codec, and between how many ranks; plain data."""

    wires: Wires
    shards: int
    copies: int
    cut: bool
    """Whether copies have pieces of a shard's masters."""
    whole: bool
    """Whether each rank steps everything (stage 0)."""
    gathers: bool
    """Whether trained weights are gathered; frozen ones are if `gathers_frozen`."""
    gathers_frozen: bool
    every_microbatch: bool
    """Whether gradients are reduced in every microbatch."""

    @property
    def ranks(self) -> int:
        """Data ranks."""
        return self.shards * self.copies

    def arrives(self, values: torch.Tensor, trained: bool) -> torch.Tensor:
        """What the gathers deliver of a parameter's master (1-D)."""
        wires = self.wires
        if trained and self.cut and wires.copies is not None:
            values = wires.copies.rounded(values)
        codec = wires.weights if trained else wires.frozen
        gathered = self.shards > 1 and (self.gathers if trained else self.gathers_frozen)
        return codec.rounded(values) if gathered and codec is not None else values


def encoding_of(
    layout: Mapping[str, Any], model: nn.Module, world: int
) -> tuple[Encoding | None, dict[str, Any], list[str]]:
    """(what one process has to imitate or None, the layout to compare, what is to be said of it). `layout`: without "auto"."""
    config = load_config(dict(layout))
    placements, axes = placements_for(config), axes_of(config, world)
    wires = placements.wires
    if not any((wires.weights, wires.frozen, wires.gradients, wires.copies, wires.stages)):
        return None, dict(layout), []
    beside = [axis for axis in ("tp", "cp", "ep") if axes.size(axis) > 1]
    if axes.size("pp") > 1 and (wires.stages is not None or _is_tied(model)):
        beside.append("pp")
    if beside:
        what = f"without encoded messages: beside {', '.join(beside)} a message is a part of a gradient or of a hidden state"
        return None, _without(layout), [f"{what}, which one process does not have"]
    layout, said = in_fp32(
        layout, "where messages are encoded, the last bit of a number decides in which step of a block it falls"
    )
    shards, copies = axes.size("shard"), axes.size("dp_replicate")
    encoding = Encoding(
        replace(wires, machine=wires.machine if 1 < wires.machine < shards else 1),
        shards,
        copies,
        cut=copies > 1 and placements.copies is Placement.SHARD,
        whole=placements.optim is not Placement.SHARD,
        gathers=placements.optim is Placement.SHARD,
        gathers_frozen=placements.params is Placement.SHARD,
        every_microbatch=placements.grads is Placement.SHARD,
    )
    return encoding, layout, said


def in_fp32(layout: Mapping[str, Any], why: str) -> tuple[dict[str, Any], list[str]]:
    """(the layout without half precision, what is to be said of it)."""
    half = [key for key in _HALF if key in layout]
    said = [f"in fp32, without {', '.join(half)}: {why}"] if half else []
    return {key: value for key, value in layout.items() if key not in half}, said


def _is_tied(model: nn.Module) -> bool:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return len(names) > len([name for name, _ in model.named_parameters()])


def _without(layout: Mapping[str, Any]) -> dict[str, Any]:
    """The layout without codecs."""
    own = {key: value for key, value in layout.get("hf_dist", {}).items() if key != "wires"}
    zero = {key: value for key, value in layout.get("zero_optimization", {}).items() if key not in _KEYS}
    return {**layout, "hf_dist": own, **({"zero_optimization": zero} if "zero_optimization" in layout else {})}


@torch.no_grad()
def counts_of(window: Sequence[Batch], loss: Callable[..., torch.Tensor]) -> Counts:
    """The counts of labels or rows by which the losses of a window's microbatches add up to the loss of all in one batch.

    `loss`: of a batch, and of None if it is to be a mean over that batch alone. The window tells among models that divide a sum
    by the items of the window (no counts), means over labels, labels after the first position, and means over rows.
    """
    together = joined(window)
    ways: list[Counts] = [
        _no_counts,
        *(functools.partial(_counted, count) for count in (_rows, _labels, _later_labels)),
    ]
    if together is None:
        return ways[1]
    whole = float(loss(together))

    def apart(counts: Counts) -> float:
        numbers = counts(window)
        if numbers is None:
            return abs(sum(float(loss(batch)) for batch in window) - whole)
        means = [float(loss(batch, None)) for batch in window]
        return abs(sum(n * mean for n, mean in zip(numbers, means, strict=True)) / max(1, sum(numbers)) - whole)

    return min(ways, key=apart)


def _no_counts(window: Sequence[Batch]) -> None:
    return None


def _counted(count: Callable[[Batch], int], window: Sequence[Batch]) -> list[int]:
    return [count(batch) for batch in window]


def _rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _labels(batch: Batch) -> int:
    return int((batch["labels"] != IGNORED).sum()) if "labels" in batch else 0


def _later_labels(batch: Batch) -> int:
    labels = batch.get("labels")
    return 0 if labels is None or labels.dim() < 2 else int((labels[:, 1:] != IGNORED).sum())


class Messages:
    """The messages of a training, from its first step on."""

    def __init__(self, model: nn.Module, encoding: Encoding) -> None:
        self._encoding = encoding
        self._params = dict(model.named_parameters())
        self._gradients: dict[str, list[list[torch.Tensor | None]]] = {}
        """By parameter, by data rank, by microbatch."""
        self._rests: dict[object, torch.Tensor] = defaultdict(lambda: torch.zeros(()))
        self.number = 0
        """Microbatches of this window so far."""
        self.forget()

    def forget(self) -> None:
        """Begin a window."""
        self._gradients = {name: [[] for _ in range(self._encoding.ranks)] for name in self._params}
        self.number = 0

    @contextmanager
    def delivered(self) -> Iterator[None]:
        """Inside, parameters are what arrives of them."""
        masters = {name: p.data for name, p in self._params.items()}
        for name, p in self._params.items():
            if p.is_floating_point():
                arrived = self._encoding.arrives(masters[name].reshape(-1), p.requires_grad)
                p.data = arrived.view(p.shape)
        try:
            yield
        finally:
            for name, p in self._params.items():
                p.data = masters[name]

    def take(self) -> None:
        """Take the gradients of the next microbatch: rank 0's first one, rank 1's first one, and so on."""
        rank = self.number % self._encoding.ranks
        self.number += 1
        for name, p in self._params.items():
            grad, p.grad = p.grad, None
            scaled = None if grad is None else grad.float().reshape(-1) * self._encoding.ranks
            self._gradients[name][rank].append(scaled)

    def give(self) -> None:
        """Set every gradient to the mean of what arrives, and begin the next window."""
        for name, p in self._params.items():
            ranks = self._gradients[name]
            if all(grad is None for parts in ranks for grad in parts):
                continue
            none = torch.zeros(p.numel())
            found = [[none if grad is None else grad for grad in parts] for parts in ranks]
            p.grad = self._mean(name, found).view(p.shape).to(p.dtype)
        self.forget()

    def _mean(self, name: str, ranks: list[list[torch.Tensor]]) -> torch.Tensor:
        encoding = self._encoding
        if not encoding.every_microbatch:
            ranks = [[sum(parts[1:], parts[0])] for parts in ranks]
        means = []
        for copy in range(encoding.copies):
            own = ranks[copy * encoding.shards : (copy + 1) * encoding.shards]
            key = (name, "copy", copy)
            rounds = [self._over_shards(key, list(parts)) for parts in zip(*own, strict=True)]
            means.append(sum(rounds[1:], rounds[0]))
        if encoding.copies == 1:
            return means[0]
        return self._reduced((name, "copies"), means, encoding.wires.copies, whole=not encoding.cut)

    def _over_shards(self, key: object, parts: list[torch.Tensor]) -> torch.Tensor:
        encoding = self._encoding
        codec = encoding.wires.gradients if encoding.shards > 1 else None
        return self._reduced(key, parts, codec, whole=encoding.whole, near=encoding.wires.machine)

    def _reduced(
        self, key: object, parts: Sequence[torch.Tensor], codec: Codec | None, *, whole: bool, near: int = 1
    ) -> torch.Tensor:
        """The mean of `parts`, one a rank; `whole`: it travels once more, to all; `near`: ranks of a first hop."""
        if codec is None:
            return torch.stack(list(parts)).mean(0)
        arrived = [self._sent((key, rank), part, codec) for rank, part in enumerate(parts)]
        if near > 1:
            sums = [sum(arrived[at + 1 : at + near], arrived[at]) for at in range(0, len(arrived), near)]
            arrived = [self._sent((key, "sum", machine), total, codec) for machine, total in enumerate(sums)]
        mean = sum(arrived[1:], arrived[0]) * (1.0 / len(parts))
        return self._sent((key, "mean"), mean, codec) if whole else mean

    def _sent(self, key: object, values: torch.Tensor, codec: Codec) -> torch.Tensor:
        """What arrives of a message; with error feedback the rest of it is added to the next one."""
        if not self._encoding.wires.feedback:
            return codec.rounded(values)
        whole = self._rests[key] + values
        arrived = codec.rounded(whole)
        self._rests[key] = whole - arrived
        return arrived
