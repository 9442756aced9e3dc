"""Data ranks in one process, to read streams without `torch.distributed`: a thread per rank, one of which runs at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_dist.hf.streams.lanes import Lanes
from hf_dist.hf.streams.loader import Position, StreamLoader
from hf_dist.hf.streams.plan import plan_of
from hf_dist.hf.streams.windows import Shape

_SECONDS = 60


class _Meeting:
    """Where the ranks of a job meet. Only the one that holds `turn` runs."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.turn = threading.Lock()
        self.values: list[Any] = [None] * size


class ThreadRank:
    """One of several data ranks (`windows.DataRanks`)."""

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting

    def any(self, value: bool) -> bool:
        """Whether it is true on a rank."""
        return any(self.exchange(value))

    def exchange(self, value: Any) -> list[Any]:
        """The value of each rank."""
        meeting = self._meeting
        meeting.values[self.rank] = value
        meeting.turn.release()
        try:
            meeting.barrier.wait(_SECONDS)
            found = list(meeting.values)
            meeting.barrier.wait(_SECONDS)
        finally:
            meeting.turn.acquire()
        return found


def on_ranks(size: int, job: Callable[[ThreadRank], Any]) -> list[Any]:
    """What `job` returns on each of `size` ranks. Raises what one of them has raised."""
    meeting, results, errors = _Meeting(size), [None] * size, []

    def run(rank: int) -> None:
        with meeting.turn:
            try:
                results[rank] = job(ThreadRank(meeting, rank, size))
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                errors.append(error)
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _collated(rows: list[Any]) -> dict[str, Any]:
    return {"rows": rows, "labels": torch.zeros(len(rows), dtype=torch.long)}


def loader_of(
    dataset: Any,
    rank: ThreadRank,
    lanes: int,
    batch: int,
    accumulation: int,
    *,
    by_first: bool | None = None,
    **options: Any,
) -> StreamLoader:
    """A loader as the Trainer's, whose batches hold their rows as they are."""
    fills = not hasattr(dataset, "__len__")
    shape = Shape(accumulation, batch, fills=fills)
    plan = plan_of(Lanes(lanes), dataset, shape, rank, by_first=by_first)
    return StreamLoader(plan, dataset, None, False, {"batch_size": batch, "collate_fn": _collated, **options})


def steps_of(loader: StreamLoader, epochs: int, accumulation: int) -> Iterator[tuple[list[Any], Position]]:
    """The rows of each step on this rank, and the position behind them; over all epochs that are left."""
    while loader.iteration < epochs:
        before = loader.iteration
        rows: list[Any] = []
        for count, batch in enumerate(loader, 1):
            if batch["labels"].ne(-100).all():  # else a row of another microbatch, without weight
                rows += batch["rows"]
            if count % accumulation == 0:
                yield rows, loader.position()
                rows = []
        assert not rows, "each window is complete"
        assert loader.iteration == before + 1
