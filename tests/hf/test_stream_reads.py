"""What a stream reads: the lanes of a rank and no others; after a resume the rows that are to come."""

from __future__ import annotations

import io
import itertools
import logging
import pickle
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from hf_dist.errors import CheckpointError, ConfigError
from hf_dist.hf.stateful_loaders import of_all_lanes
from hf_dist.hf.streams.in_checkpoint import states_of_lanes
from hf_dist.hf.streams.lanes import Lanes
from hf_dist.hf.streams.loader import StreamLoader
from hf_dist.hf.streams.plan import first_lanes
from tests.hf.lanes_in_process import ThreadRank, loader_of, on_ranks, steps_of
from tests.hf.test_stream_chains import Counting, Stateful, ids, plain

LANES = 12
read_by: dict[int, Counter[int]] = {}
"""Thread -> shard -> rows that were read."""


def noted(shards: list[int]) -> Iterator[dict[str, int]]:
    """Twenty rows of each shard; notes who reads them."""
    for shard in shards:
        for row in range(20):
            read_by.setdefault(threading.get_ident(), Counter())[shard] += 1
            yield {"shard": shard, "row": row}


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_no_rank_reads_lanes_of_another_and_each_row_is_read_once(ranks: int) -> None:
    read_by.clear()
    dataset = datasets.IterableDataset.from_generator(noted, gen_kwargs={"shards": list(range(25))})

    def job(rank: ThreadRank) -> tuple[int, list[int]]:
        loader = loader_of(dataset, rank, LANES, 2, 1)
        list(steps_of(loader, 1, 1))
        return threading.get_ident(), Lanes(LANES).owned(rank.rank, rank.size)

    for thread, lanes in on_ranks(ranks, job):
        assert read_by[thread] == Counter({shard: 20 for shard in range(25) if shard % LANES in lanes})


def stopped_after(dataset: Any, steps: int, **options: Any) -> dict[str, Any]:
    """The state of a loader of one process, as a file has it, after steps of 8 rows."""

    def job(rank: ThreadRank) -> Any:
        loader = loader_of(dataset, rank, options.pop("lanes", 1), 8, 1, **options)
        for count, _ in enumerate(steps_of(loader, 3, 1), 1):
            if count == steps:
                return pickle.loads(pickle.dumps(loader.state_dict()))
        raise AssertionError

    return dict(on_ranks(1, job)[0])


def resumed(dataset: Any, state: dict[str, Any], epochs: int, **options: Any) -> tuple[list[Any], StreamLoader]:
    """The ids of each step that is to come."""

    def job(rank: ThreadRank) -> Any:
        loader = loader_of(dataset, rank, options.pop("lanes", 1), 8, 1, **options)
        loader.load_state_dict(state)
        return [ids(rows) for rows, _ in steps_of(loader, epochs, 1)], loader

    found: tuple[list[Any], StreamLoader] = on_ranks(1, job)[0]
    return found


class Long(Stateful):
    """Counts the rows that were read of it."""

    read = 0

    def __iter__(self) -> Iterator[dict[str, int]]:
        for row in super().__iter__():
            Long.read += 1
            yield row


def test_a_resume_near_the_end_of_ten_million_rows_reads_what_is_left() -> None:
    """transformers#31441: the stock Trainer reads all rows before again."""
    rows, left = 10_000_000, 1000
    Long.read = 0
    states = {0: {"row": rows - left - 40, "state": {"next": rows - left - 40}}}
    state = {"epoch": 0, "rows": [rows - left], "lengths": [None], "states": states}
    found, _ = resumed(Long(rows), state, 1)
    assert [row for step in found for _, row in step] == list(range(rows - left, rows))
    assert Long.read == left + 40


def test_a_place_is_at_most_as_far_behind_a_state_as_states_are_apart() -> None:
    state = stopped_after(Stateful(10_000), 100)
    assert state["rows"] == [800]
    assert 800 - state["states"][0]["row"] < 64


def test_the_line_of_a_dataset_without_a_state_tells_the_rows_that_were_read_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = stopped_after(Counting(1000), 50)
    with caplog.at_level(logging.INFO, "hf_dist"):
        found, loader = resumed(Counting(1000), state, 1)
    assert [row for step in found for _, row in step] == list(range(400, 1000))
    (line,) = [record.getMessage() for record in caplog.records if "read and dropped" in record.getMessage()]
    assert re.match(
        r"Counting: it has no state_dict: 400 rows were read and dropped in \d+\.\d s to come to the place", line
    )
    assert loader.batches.feed is not None and loader.batches.feed.read == 600
    caplog.clear()
    with caplog.at_level(logging.INFO, "hf_dist"):
        resumed(Stateful(1000), stopped_after(Stateful(1000), 50), 1)
    assert not caplog.records, "a dataset with a state has nothing to tell"


class Unsaved(Stateful):
    """Its state has things that are not read from a file."""

    def state_dict(self) -> Any:
        return {"next": self.next, "file": Path("rows")}


def test_a_state_that_cannot_be_read_back_is_said_and_the_rows_are_read_again(caplog: pytest.LogCaptureFixture) -> None:
    def job(rank: ThreadRank) -> Any:
        loader = loader_of(Unsaved(1000), rank, 1, 8, 1)
        list(itertools.islice(steps_of(loader, 1, 1), 50))
        return states_of_lanes(loader, loader.position())

    with caplog.at_level(logging.INFO, "hf_dist"):
        (states,) = on_ranks(1, job)
    assert "the state of the dataset, lane 0, holds other things" in caplog.text
    saved = torch.load(io.BytesIO(states["lane.0"].numpy().tobytes()), weights_only=True)
    assert saved == {"row": 0, "state": None}
    with caplog.at_level(logging.INFO, "hf_dist"):
        found, _ = resumed(Unsaved(1000), {"epoch": 0, "rows": [400], "lengths": [None], "states": {0: saved}}, 1)
    assert [row for step in found for _, row in step] == list(range(400, 1000))
    assert "Unsaved: no state of it was saved: 400 rows were read and dropped" in caplog.text


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_after_a_resume_are_whole(workers: int) -> None:
    """datasets#7447: with persistent workers all epochs after a resume began where the resumed one did."""
    dataset, lanes = plain((9, 4, 6)), 4
    options: dict[str, Any] = {"lanes": lanes, "num_workers": workers, "persistent_workers": workers > 0}
    state = stopped_after(dataset, 5, **options)
    found, _ = resumed(dataset, state, 3, **options)
    size = sum((9, 4, 6)[shard % 3] for shard in range(13))
    assert sum(map(len, found)) == 3 * size - 40
    everything = Counter(row for step in found for row in step)
    assert set(everything.values()) == {2, 3} and len(everything) == size
    assert [found[i] for i in range(-size // 8, 0)] == resumed(
        dataset, {**state, "epoch": 2, "rows": [0] * lanes}, 3, **options
    )[0]


def test_a_second_resume_goes_on_where_the_first_was_stopped() -> None:
    """datasets PR 8295: the state of a resumed dataset was that of its beginning, so the second resume started over."""
    dataset = plain((300,), shards=2)

    def again(rank: ThreadRank, state: Any, steps: int) -> Any:
        loader = loader_of(dataset, rank, 2, 8, 1)
        if state is not None:
            loader.load_state_dict(state)
        seen = []
        for rows, _ in steps_of(loader, 1, 1):
            seen.append(ids(rows))
            if len(seen) == steps:
                break
        return seen, loader.state_dict()

    seen: list[Any] = []
    state = None
    for steps in (9, 21, 17, -1):
        more, state = on_ranks(1, lambda rank, s=state, n=steps: again(rank, s, n))[0]
        seen += more
    assert seen == on_ranks(1, lambda rank: again(rank, None, -1))[0][0]


def test_a_resume_on_ranks_that_cannot_share_the_lanes_is_refused_unless_one_reads_for_all() -> None:
    state = stopped_after(plain((9, 4, 6)), 3, lanes=LANES)

    def job(rank: ThreadRank, by_first: bool | None) -> Any:
        loader = loader_of(plain((9, 4, 6)), rank, 5, 2, 1, by_first=by_first)
        loader.load_state_dict(state)
        return [ids(rows) for rows, _ in steps_of(loader, 1, 1)]

    with pytest.raises(ConfigError, match="12 lanes cannot be shared by 5 data ranks"):
        on_ranks(5, lambda rank: job(rank, None))
    found = on_ranks(5, lambda rank: job(rank, True))
    rows = sorted(row for of_rank in found for step in of_rank for row in step)
    assert len(rows) == len(set(rows)) == sum((9, 4, 6)[shard % 3] for shard in range(13)) - 24


def test_a_loop_goes_on_with_the_lanes_of_other_ranks(tmp_path: Path) -> None:
    dataset = plain((9, 4, 6))

    def begun(rank: ThreadRank) -> Any:
        loader = loader_of(dataset, rank, 6, 2, 1)
        rows = next(steps_of(loader, 1, 1))[0]
        return ids(rows), loader.state_dict()

    first = on_ranks(2, begun)
    of_ranks = {rank: state for rank, (_, state) in enumerate(first)}
    assert [sorted(state["states"]) for state in of_ranks.values()] == [[0, 2, 4], [1, 3, 5]]

    def rest(rank: ThreadRank) -> Any:
        loader = loader_of(dataset, rank, 6, 2, 1)
        loader.load_state_dict(of_all_lanes(of_ranks.get(rank.rank, of_ranks[0]), of_ranks, tmp_path))
        return [row for rows, _ in steps_of(loader, 1, 1) for row in ids(rows)]

    seen = [row for rows, _ in first for row in rows] + [row for rows in on_ranks(3, rest) for row in rows]
    assert len(seen) == len(set(seen)) == sum((9, 4, 6)[shard % 3] for shard in range(13))
    with pytest.raises(CheckpointError, match="has no lanes"):
        of_all_lanes({}, {0: {"next": 3}}, tmp_path)


def test_more_lanes_than_shards_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    assert first_lanes(plain((3,)), 2, 0, 6) == Lanes(6)
    with pytest.raises(ConfigError, match=r"hf_dist.data_lanes.*14.*the dataset has 13"):
        first_lanes(plain((3,)), 2, 0, 14)
    with caplog.at_level(logging.INFO, "hf_dist"):
        assert first_lanes(Counting(9), 2, 3, 14) == Lanes(3)
    assert "data_lanes 14 has no effect: Counting has no shards" in caplog.text
