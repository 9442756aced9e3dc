"""Streams in chains of runs, each killed and gone on with on other ranks: the rows of each step are those of one run.

The ranks are threads (`lanes_in_process.py`); with the Trainer and processes: `test_streams_in_trainer.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import datasets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from hf_dist.hf.streams import lane_reader
from hf_dist.hf.streams.loader import Position, StreamLoader
from tests.covering import FULL_GRID
from tests.hf.lanes_in_process import ThreadRank, loader_of, on_ranks, steps_of

LANES, STEP, EPOCHS = 12, 24, 2
"""24 rows of a step can be shared by 1, 2, 3, 4 and 6 ranks."""


def rows_of_shard(shards: list[int], lengths: tuple[int, ...]) -> Iterator[dict[str, int]]:
    """Rows that say where they come from."""
    for shard in shards:
        for row in range(lengths[shard % len(lengths)]):
            yield {"shard": shard, "row": row}


def plain(lengths: tuple[int, ...], shards: int = 13) -> Any:
    """Shards of unequal length."""
    arguments = {"shards": list(range(shards)), "lengths": lengths}
    return datasets.IterableDataset.from_generator(rows_of_shard, gen_kwargs=arguments)


def doubled(batch: dict[str, list[int]]) -> dict[str, list[int]]:
    """Two rows of each."""
    return {
        "shard": [s for s in batch["shard"] for _ in range(2)],
        "row": [2 * r + i for r in batch["row"] for i in (0, 1)],
    }


def is_kept(row: dict[str, int]) -> bool:
    """Not every third."""
    return row["row"] % 3 != 1


def mixture(lengths: tuple[int, ...], **options: Any) -> Any:
    """Of two sources."""
    other = plain(lengths[::-1]).map(moved)
    return datasets.interleave_datasets([plain(lengths), other], probabilities=[0.7, 0.3], seed=5, **options)


def moved(row: dict[str, int]) -> dict[str, int]:
    """Into shards of other numbers."""
    return {**row, "shard": row["shard"] + 100}


class Counting(IterableDataset[Any]):
    """Rows of one sequence, divided among workers by the dataset itself; with `keeps`, with a state."""

    def __init__(self, rows: int) -> None:
        self.rows, self.next = rows, 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        while self.next < len(range(first, self.rows, step)):
            self.next += 1
            yield {"shard": 0, "row": first + (self.next - 1) * step}
        self.next = 0


class Stateful(Counting):
    """With a state."""

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


KINDS = {
    "plain": plain,
    "mapped": lambda lengths: plain(lengths).map(moved),
    "batched": lambda lengths: plain(lengths).map(doubled, batched=True, batch_size=4),
    "filtered": lambda lengths: plain(lengths).filter(is_kept),
    "shuffled": lambda lengths: plain(lengths).shuffle(seed=3, buffer_size=20),
    "shuffled and mapped": lambda lengths: (
        plain(lengths).shuffle(seed=3, buffer_size=7).map(doubled, batched=True, batch_size=4)
    ),
    "mixture": mixture,
    "mixture of all": functools.partial(mixture, stopping_strategy="all_exhausted"),
    "shuffled mixture": lambda lengths: mixture(lengths).shuffle(seed=3, buffer_size=20),
    "two in a row": lambda lengths: datasets.concatenate_datasets([plain(lengths), plain(lengths).map(moved)]),
    "of its own": lambda lengths: Counting(sum(lengths) * 4),
    "of its own with a state": lambda lengths: Stateful(sum(lengths) * 4),
}


@dataclass(frozen=True)
class Run:
    """One run of a chain."""

    ranks: int
    batch: int
    """Rows of a microbatch on one rank."""
    stop: int
    """After so many steps, the run is killed and goes on as the next one."""
    by_first: bool = False
    """Whether rank 0 reads for all."""

    @property
    def accumulation(self) -> int:
        return STEP // self.ranks // self.batch


def ids(rows: list[dict[str, int]]) -> list[tuple[int, int]]:
    """Of the rows of a step."""
    return sorted((row["shard"], row["row"]) for row in rows)


def read(
    kind: str, lengths: tuple[int, ...], run: Run, start: Position | None, **options: Any
) -> tuple[list[Any], Any, Any]:
    """The rows of each step, the position where the run stopped, and the loaders."""

    def job(rank: ThreadRank) -> tuple[list[Any], Position | None, StreamLoader]:
        loader = loader_of(
            KINDS[kind](lengths), rank, LANES, run.batch, run.accumulation, by_first=run.by_first or None, **options
        )
        if start is not None:
            loader.begin_at(start)
        seen, position = [], None
        for rows, behind in steps_of(loader, EPOCHS, run.accumulation):
            seen.append(rows)
            position = behind
            if len(seen) == run.stop:
                break
        return seen, position, loader

    found = on_ranks(run.ranks, job)
    steps = [list(itertools.chain.from_iterable(of_rank[0][i] for of_rank in found)) for i in range(len(found[0][0]))]
    positions = [position for _, position, _ in found if position is not None]
    if not positions:
        return steps, None, [loader for *_, loader in found]
    assert len({position.place for position in positions}) == 1, "all ranks know where the run stands"
    starts = {lane: start for position in positions[::-1] for lane, start in position.starts.items()}
    return steps, replace(positions[0], starts=starts), [loader for *_, loader in found]


@functools.cache
def whole(kind: str, lengths: tuple[int, ...]) -> list[Any]:
    """The ids of each step of one process that nobody stops."""
    steps, *_ = read(kind, lengths, Run(1, 4, -1), None)
    return [ids(rows) for rows in steps]


runs = st.sampled_from([1, 2, 3, 4, 6]).flatmap(
    lambda ranks: st.builds(
        Run,
        st.just(ranks),
        st.sampled_from([size for size in (1, 2, 4, 12, 24) if STEP // ranks % size == 0]),
        st.integers(1, 6),
        st.booleans() if ranks > 1 else st.just(False),
    )
)


def check_chain(kind: str, lengths: tuple[int, ...], chain: list[Run], **options: Any) -> None:
    """The chain has the rows of `whole`, step by step."""
    steps: list[Any] = []
    position: Position | None = None
    for number, run in enumerate(chain):
        run = replace(run, stop=-1 if number == len(chain) - 1 else run.stop)
        found, position, _ = read(kind, lengths, run, position, **options)
        steps += [ids(rows) for rows in found]
        if position is None:
            break
    assert steps == whole(kind, lengths)


@settings(max_examples=400 if FULL_GRID else 40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(sorted(KINDS)), st.sampled_from([(9, 4, 6), (1, 14, 3, 0)]),
    st.lists(runs, min_size=2, max_size=4), st.sampled_from([1, 2, 5, 64]),
)  # fmt: skip
def test_a_chain_of_runs_has_the_rows_of_one_run(
    kind: str, lengths: tuple[int, ...], chain: list[Run], every: int
) -> None:
    with mock.patch.object(lane_reader, "_EVERY", every):
        check_chain(kind, lengths, chain)


def test_rows_of_the_ranks_in_turn_are_in_the_order_of_one_process_to_the_end_of_an_epoch() -> None:
    """A microbatch has the same rows on any number of ranks: that of rank r of D has each D-th one."""
    lengths = (9, 4, 6)

    def job(rank: ThreadRank) -> list[list[Any]]:
        loader = loader_of(plain(lengths), rank, LANES, STEP // rank.size // 2, 2)
        return [[(row["shard"], row["row"]) for row in rows] for rows, _ in steps_of(loader, 1, 2)]

    (whole_order,) = on_ranks(1, job)
    for ranks in (2, 3):
        steps = zip(*on_ranks(ranks, job), strict=True)
        turns = [[row for turn in itertools.zip_longest(*of_ranks) for row in turn if row] for of_ranks in steps]
        assert turns == whole_order
