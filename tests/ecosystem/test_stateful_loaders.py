"""`use_stateful_dataloader` in an accelerate loop: a loaded state goes on with the rows that were to come."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hf_dist import DistAccelerator
from tests.attempts import attempts
from tests.harness import run_ranks

ROWS, MICRO, EPOCHS = 22, 2, 2
STOPS = {"within the first epoch": 3, "within the second": 14, "between them": 11}
"""Batches of one rank before the state is saved, of 11 in an epoch of one process."""


class Stream(IterableDataset[torch.Tensor]):
    """Numbers in order, others on each rank, with a state of its own."""

    def __init__(self) -> None:
        self.first = 100 * int(os.environ.get("RANK", "0"))
        self.next = self.first

    def __iter__(self) -> Any:
        while self.next < self.first + ROWS:
            self.next += 1
            yield torch.tensor([float(self.next - 1)])
        self.next = self.first

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def loop(kind: str, workers: int = 0) -> tuple[DistAccelerator, Any]:
    """An accelerator with a model and a loader."""
    how = DataLoaderConfiguration(
        use_stateful_dataloader=True, dispatch_batches=False, use_seedable_sampler=True, data_seed=7
    )
    accelerator = DistAccelerator(dist_config={"zero_optimization": {"stage": 1}}, dataloader_config=how)
    model = torch.nn.Linear(1, 1)
    data: Any = Stream() if kind == "stream" else TensorDataset(torch.arange(float(ROWS))[:, None])
    loader = DataLoader(data, batch_size=MICRO, shuffle=kind == "shuffled", num_workers=workers)
    model, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    return accelerator, loader


def rows_of(batch: Any) -> list[float]:
    return [float(x) for x in (batch if isinstance(batch, torch.Tensor) else batch[0]).flatten()]


def batches(loader: Any, epochs: int) -> Any:
    for _ in range(epochs):
        yield from map(rows_of, loader)


def resumed(rank: int, world: int, folder: str, kind: str, workers: int, stop: int) -> tuple[list[Any], list[Any]]:
    """What is to come after `stop` batches: in the same run, and after a load of its state."""
    accelerator, loader = loop(kind, workers)
    running = batches(loader, EPOCHS)
    list(itertools.islice(running, stop))
    accelerator.save_state(folder)
    wanted = list(running)
    accelerator, loader = loop(kind, workers)
    accelerator.load_state(folder)
    per_epoch = len(range(0, ROWS, MICRO * world))
    return wanted, list(batches(loader, EPOCHS - stop // per_epoch))


def on_ranks(rank: int, world: int, folder: str, cases: list[tuple[str, int, int]]) -> list[Any]:
    """`resumed` of each case."""
    return attempts(
        rank, world, ((lambda i=i, c=c: resumed(rank, world, f"{folder}/{i}", *c)) for i, c in enumerate(cases))
    )


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize(("kind", "workers"), [("shuffled", 0), ("shuffled", 1), ("stream", 0)])
def test_a_loaded_state_goes_on_with_the_next_rows(kind: str, workers: int, stop: str, tmp_path: Path) -> None:
    wanted, found = resumed(0, 1, str(tmp_path), kind, workers, STOPS[stop])
    assert len(wanted) == EPOCHS * ROWS // MICRO - STOPS[stop]
    assert found == wanted


def test_two_ranks_go_on_each_with_its_own_rows_and_another_number_of_ranks_with_all(tmp_path: Path) -> None:
    cases = [("shuffled", 0, 2), ("shuffled", 0, 8), ("stream", 0, 2)]
    ranks = run_ranks(on_ranks, 2, (str(tmp_path), cases))
    for found in ranks:
        for case in found:
            assert not isinstance(case, str), case
            assert case[0] == case[1] and case[0]
    together = [a + b for a, b in zip(ranks[0][0][0], ranks[1][0][0], strict=True)]
    accelerator, loader = loop("shuffled")
    accelerator.load_state(tmp_path / "0")
    alone = next(iter(batches(loader, 1)))
    assert alone == together[0][: len(alone)]
    accelerator, loader = loop("stream")
    accelerator.load_state(tmp_path / "2")
    assert next(iter(batches(loader, 1))) == [8.0, 9.0], "behind two batches of two rows on two ranks"
