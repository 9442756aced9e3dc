"""Collectives that take long: one process plays a rank of several, and what the others would send comes late.

On a GPU a collective runs on a stream of its own, behind a sleep of some milliseconds; on a CPU when it is waited for. Until
then what it fills is NaN. So who reads before the wait reads NaN, and memory that is given away too early is written over.

The other ranks read the same rows, so that their gradients are this rank's. Their weights come from a training of one process
that was recorded: `Recorded` holds them after every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hf_dist.dist import collectives
from tests.scale.world import fake_world

__all__ = ["Delayed", "Recorded", "delayed_rank"]

SLEEP_CYCLES = 20_000_000
"""Some ten milliseconds of a GPU: longer than a step of these models computes."""
Recorded = list[Mapping[str, torch.Tensor]]
"""Weights by their names, fp32 on the CPU: at the start, and after each step."""


Filled = list[tuple[torch.Tensor, torch.Tensor]]
"""What a collective writes, and what it finds out."""


class LateWork:
    """A collective under way; holds what it reads and writes, as NCCL's do."""

    def __init__(self, name: str, stream: Any, filled: Filled, source: torch.Tensor | None = None) -> None:
        """`source`: what it sends and nobody may change before the wait; looked at on a CPU."""
        self.name = name
        self._filled: Filled | None = filled
        self._sent = None if source is None or stream is not None else (source, source.clone())
        self._arrived: Any = None
        if stream is None:
            for written, _ in filled:
                written.fill_(float("nan"))
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for written, _ in filled:
                written.fill_(float("nan"))
            torch.cuda._sleep(SLEEP_CYCLES)
            for written, data in filled:
                written.copy_(data)
            self._arrived = torch.cuda.Event()
            self._arrived.record(stream)

    def wait(self, timeout: Any = None) -> bool:
        """As torch's: the current stream waits, not the host; on a CPU the data comes now."""
        if self._filled is not None and self._arrived is None:
            if self._sent is not None:
                sent, before = self._sent
                assert torch.equal(sent.nan_to_num(7.0), before.nan_to_num(7.0)), "what is being sent was changed"
            for written, data in self._filled:
                written.copy_(data)
        elif self._filled is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
        self._filled = self._sent = None
        return True

    def is_completed(self) -> bool:
        """Nobody may count on it."""
        return False


class Delayed:
    """Takes the place of torch's collectives for one rank of several."""

    def __init__(self, device: torch.device, recorded: Recorded) -> None:
        # On the device from the start: a copy from ordinary host memory in a collective would make the host wait.
        self.recorded = [{name: values.to(device) for name, values in weights.items()} for weights in recorded]
        self.stream: Any = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self.engine: Any = None
        """Of this rank; set it before the first step."""
        self.step = 0
        """Optimizer steps that weights which are gathered now have behind them."""
        self.counts: Counter[str] = Counter()

    def all_gather(self, full: torch.Tensor, own: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        """The other parts come from the weights of the recorded step."""
        flat = next(g for g in self.engine.sharded.groups if g.full.values is full)
        weights = torch.zeros(flat.layout.numel, dtype=torch.float32, device=full.device)
        for slot in flat.layout.slots:
            weights[slot.offset : slot.stop] = self.recorded[self.step][slot.name].reshape(-1)
        data = weights.to(full.dtype)
        start = dist.get_rank(group) * own.numel()
        others = [slice(0, start), slice(start + own.numel(), None)]
        return self._begin("all_gather", [(full[s], data[s]) for s in others], async_op, own)

    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Any:
        """What all ranks send is the same."""
        part = full.narrow(0, dist.get_rank(group) * out.numel(), out.numel())
        return self._begin("reduce_scatter", [(out, _combined(part, op, group))], async_op, full)

    def all_reduce(
        self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        """In place."""
        combined = _combined(tensor, op, group)
        late = [(tensor, combined)] if tensor.is_floating_point() else []
        return self._begin("all_reduce", late, async_op)

    def _begin(self, name: str, filled: Filled, async_op: bool, source: torch.Tensor | None = None) -> Any:
        self.counts[name] += 1
        work = LateWork(name, self.stream, filled, source)
        return work if async_op else work.wait()


def _combined(tensor: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
    """Of equal tensors; exact where the number of ranks is a power of two."""
    return tensor * dist.get_world_size(group) if op == dist.ReduceOp.SUM else tensor.clone()


@contextmanager
def delayed_rank(world: int, rank: int, device: torch.device, recorded: Recorded) -> Iterator[Delayed]:
    """Inside, this process is `rank` of `world`, and its collectives are late."""
    late = Delayed(device, recorded)
    with fake_world(world, rank):
        theirs = collectives._all_gather, collectives._reduce_scatter, dist.all_reduce
        collectives._all_gather, collectives._reduce_scatter = late.all_gather, late.reduce_scatter
        dist.all_reduce = late.all_reduce
        try:
            yield late
        finally:
            collectives._all_gather, collectives._reduce_scatter, dist.all_reduce = theirs
