"""The rows of one lane of a dataset, from any row on, and the states from which a later run goes on.

A state is taken every `_EVERY` rows and kept with its row number; a place between two of them is the earlier state and the
number of rows since, which are read once more. So a row costs a count, and a dataset without a state is the same with one
state: its beginning.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch.utils.data._utils import worker

from hf_dist.hf.streams.own_division import divides_rows
from hf_dist.hf.streams.shuffle_buffer import keep_buffers

__all__ = ["BEGINNING", "LaneReader", "Mark", "has_state", "num_shards", "pass_of_lane"]

_EVERY = 64


@dataclass(frozen=True)
class Mark:
    """A row of a lane from which reading can begin."""

    row: int = 0
    state: Any = None
    """Of the dataset, before that row; None: the beginning of the lane."""


BEGINNING = Mark()
"""Of any lane."""


def num_shards(dataset: object) -> int | None:
    """Into how many parts the dataset can be cut; None where only the dataset itself knows (`get_worker_info`)."""
    known = getattr(dataset, "num_shards", None)
    if getattr(dataset, "_distributed", None) is not None:  # cut among ranks by the user already
        return None
    return int(known) if isinstance(known, int) and callable(getattr(dataset, "shard", None)) else None


def has_state(dataset: object) -> bool:
    """Whether the dataset can go on from a state of its own."""
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))


def pass_of_lane(dataset: Any, lane: int, number: int, epoch: int) -> Any:
    """The dataset of one lane of `number` in an epoch, not yet begun. `dataset` itself where it has one lane."""
    if divides_rows(dataset):
        part = dataset
    elif num_shards(dataset) is None:
        part = _copied(dataset) if _is_of_datasets(dataset) else dataset if number == 1 else copy.deepcopy(dataset)
    else:
        contiguous = {"contiguous": False} if "contiguous" in inspect.signature(dataset.shard).parameters else {}
        part = dataset.shard(num_shards=number, index=lane, **contiguous)
        if number > 1:
            _draw_differently(part, lane)
    if callable(getattr(part, "set_epoch", None)):
        part.set_epoch(epoch)
    return part


def _copied(dataset: Any) -> Any:
    found = copy.copy(dataset)
    found.__dict__ = dict(vars(dataset))  # `datasets` lets a copy share it
    return found


def _draw_differently(part: Any, lane: int) -> None:
    """Have each lane draw for itself, as `datasets` does for workers: else all would take the same source of a mixture."""
    if _is_of_datasets(part):
        from datasets import iterable_dataset

        shifted = getattr(iterable_dataset, "shift_ex_examples_rngs", None)  # older ones have none
        part._ex_iterable = part._ex_iterable if shifted is None else shifted(part._ex_iterable, lane)


@contextmanager
def _as_worker(lane: int, number: int) -> Iterator[None]:
    """Inside, the dataset sees a worker per lane, or none, whatever process reads it."""
    before = worker._worker_info
    worker._worker_info = (
        None if number == 1 else worker.WorkerInfo(id=lane, num_workers=number, seed=lane, dataset=cast(Any, None))
    )
    try:
        yield
    finally:
        worker._worker_info = before


class LaneReader:
    """Reads a lane once, from a mark on."""

    def __init__(self, dataset: Any, lane: int, number: int, epoch: int, start: Mark) -> None:
        self.lane = lane
        self.row = start.row
        """Of the lane, the next to come."""
        self.ended = False
        self.marks = [start]
        """New ones since somebody took them away."""
        divides = divides_rows(dataset)
        self._split_by_worker = number if num_shards(dataset) is None and not divides else 1
        part = pass_of_lane(dataset, lane, number, epoch)
        # A state of a buffer has all of its rows.
        self.marks_apart = max(_EVERY, keep_buffers(part)) if has_state(dataset) and not divides else 0
        """Rows between two states; 0 where there are none."""
        if start.state is not None and not divides:  # it has it from the main process
            part.load_state_dict(start.state)
        self._source = part
        self._rows: Iterator[Any] | None = None

    def read(self, count: int) -> list[Any]:
        """The next rows, fewer at the end of the lane."""
        found: list[Any] = []
        with _as_worker(self.lane, self._split_by_worker):
            if self._rows is None:
                self._rows = iter(self._source)
            while len(found) < count and not self.ended:
                try:
                    found.append(next(self._rows))
                except StopIteration:
                    self.ended = True
                    break
                self.row += 1
                if self.marks_apart and self.row % self.marks_apart == 0:
                    self.marks.append(Mark(self.row, self._state()))
        return found

    def skip(self, rows: int) -> None:
        """Read rows and drop them."""
        for first in range(0, rows, _EVERY):
            self.read(min(_EVERY, rows - first))

    def _state(self) -> Any:
        state = self._source.state_dict()
        return state if _is_of_datasets(self._source) else copy.deepcopy(state)


def _is_of_datasets(dataset: object) -> bool:
    return type(dataset).__module__.partition(".")[0] == "datasets"
