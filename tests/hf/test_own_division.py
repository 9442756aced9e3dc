"""A dataset that divides its rows itself, as mosaicml's `StreamingDataset`, goes on at any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import datasets
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import IterableDataset, get_worker_info

from hf_dist.errors import CheckpointError, ConfigError
from hf_dist.hf.streams.loader import Position
from hf_dist.hf.streams.own_division import refuse_other_loader, refuse_wrong_division
from hf_dist.hf.streams.plan import first_lanes
from tests.hf.lanes_in_process import ThreadRank, loader_of, on_ranks, steps_of

ROWS, STEP = 60, 12


class Dividing(IterableDataset[Any]):
    """What `StreamingDataset` promises: other rows for each rank, another order in each epoch, and a state of all ranks."""

    def __init__(self, rank: int, ranks: int, batch_size: int, rows: int = ROWS) -> None:
        self.rank, self.ranks, self.batch_size, self.rows = rank, ranks, batch_size, rows
        self.next_epoch = torch.zeros((), dtype=torch.long).share_memory_()  # workers count it
        self.resumed = {"epoch": -1, "sample_in_epoch": 0}

    def __len__(self) -> int:
        return self.rows // self.ranks

    def _place(self, epoch: int) -> tuple[int, int]:
        known = self.resumed
        return (epoch, 0) if known["epoch"] < epoch else (known["epoch"], known["sample_in_epoch"])

    def __iter__(self) -> Iterator[tuple[int, int]]:
        info = get_worker_info()
        assert info is None, "a worker that reads a lane alone"
        epoch, first = self._place(int(self.next_epoch))
        self.next_epoch.fill_(epoch + 1)
        for batch in range(first + self.rank * self.batch_size, self.rows, self.ranks * self.batch_size):
            for row in range(batch, batch + self.batch_size):
                yield epoch, row * 7 % self.rows if epoch % 2 else row

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, int]:
        assert from_beginning
        return {"epoch": self._place(int(self.next_epoch) - 1)[0], "sample_in_epoch": num_samples}

    def load_state_dict(self, obj: dict[str, int]) -> None:
        self.resumed = obj


def run(ranks: int, batch: int, start: Any, stop: int, by_state: bool = False, **options: Any) -> tuple[list[Any], Any]:
    """The rows of each step up to `stop`, and where the run stopped: a position and a state."""
    accumulation = STEP // ranks // batch

    def job(rank: ThreadRank) -> Any:
        dataset = Dividing(rank.rank, ranks, batch)
        loader = loader_of(dataset, rank, first_lanes(dataset, ranks, 0, None).number, batch, accumulation, **options)
        assert len(loader.base_dataloader) == ROWS // ranks // batch
        if by_state and start is not None:
            loader.load_state_dict(start[1])
        elif start is not None:
            at: Position = start[0]
            state = at.starts[0].mark.state
            loader.begin_at(loader.position_behind(at.epoch, at.place, state, None))
        seen, behind = [], None
        for rows, _ in steps_of(loader, 3, accumulation):
            seen.append(rows)
            behind = loader.position(), loader.state_dict()
            if len(seen) == stop:
                break
        return seen, behind

    found = on_ranks(ranks, job)
    assert len({position.place for _, (position, _) in found}) == 1
    return [sorted(itertools.chain(*step)) for step in zip(*(seen for seen, _ in found), strict=True)], found[0][1]


@pytest.mark.parametrize("by_state", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_chain_of_runs_has_the_rows_of_one_run(workers: int, by_state: bool) -> None:
    whole, _ = run(1, 4, None, -1)
    assert [len(step) for step in whole] == [STEP] * 15
    for stops in ((2, 3, 4, -1), (5, 5, -1), (6, 2, 3, -1)):  # in an epoch, at its end, behind the next
        steps: list[Any] = []
        start = None
        for stop, (ranks, batch) in zip(stops, itertools.cycle([(1, 12), (2, 3), (1, 4), (3, 2)])):
            options = {"num_workers": workers} if ranks == 1 else {}
            more, start = run(ranks, batch, start, stop, by_state, **options)
            steps += more
        assert steps == whole


def test_rows_that_ranks_cannot_have_had_are_refused() -> None:
    _, (position, _) = run(1, 4, None, 1)
    odd = replace(position, place=replace(position.place, rows=(11,)))
    with pytest.raises(CheckpointError, match="behind 11 rows of an epoch, which 2 data ranks"):
        run(2, 3, (odd, None), 1)


def test_a_division_that_is_not_that_of_the_run_is_refused() -> None:
    dataset = Dividing(0, 2, 3)
    refuse_wrong_division(dataset, 2, 2, 3, by_first=None)
    with pytest.raises(ConfigError, match=r"a Dividing.*among all 4 processes itself, and 2 of them"):
        refuse_wrong_division(dataset, 2, 4, 3, by_first=None)
    with pytest.raises(ConfigError, match=r"dispatch_batches: True has rank 0 read for all"):
        refuse_wrong_division(dataset, 2, 2, 3, by_first=True)
    with pytest.raises(ConfigError, match="Set batch_size=4"):
        refuse_wrong_division(dataset, 2, 2, 4, by_first=None)


def test_a_part_of_a_dataset_is_refused_where_ranks_would_take_parts_of_it() -> None:
    rows = datasets.Dataset.from_dict({"row": list(range(8))}).to_iterable_dataset(num_shards=4)
    part = split_dataset_by_node(rows, rank=1, world_size=2)
    refuse_wrong_division(rows, 2, 2, 3, by_first=None)
    refuse_wrong_division(part, 1, 1, 3, by_first=None)
    with pytest.raises(ConfigError, match=r"part 1 of 2, by split_dataset_by_node.*as it was before"):
        refuse_wrong_division(part, 2, 2, 3, by_first=None)
    refuse_other_loader(part, 1)
    with pytest.raises(ConfigError, match="Pass the dataset as it was before"):
        refuse_other_loader(part, 2)
    with pytest.raises(ConfigError, match="divides its rows among the 2 processes itself"):
        refuse_other_loader(Dividing(0, 2, 3), 2)
