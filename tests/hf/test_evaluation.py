"""Which samples of a filled batch a step of the evaluation sees, by what the collator made of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BatchEncoding

from hf_dist.hf.evaluation import ShorterBatch, gathers_by_itself, on_rows_of_the_set

SAMPLES = 3
"""Per rank and batch; of two ranks' last batch four are new: the second rank has one."""
IDS = torch.arange(SAMPLES * 4).view(SAMPLES, 4)


class Loader:
    """As accelerate's: it knows its batch over all ranks."""

    def __init__(self, total_batch_size: int = 2 * SAMPLES) -> None:
        self.total_batch_size = total_batch_size


def accelerator(rank: int, remainder: int = 4, loader: Any = None) -> Any:
    """At the last batch of an evaluation."""
    state = SimpleNamespace(end_of_dataloader=True, remainder=remainder, active_dataloader=loader or Loader())
    return SimpleNamespace(gradient_state=state, num_processes=2, process_index=rank, shorter_batch=ShorterBatch())


def seen(inputs: Any, **given: Any) -> Any:
    """What the step is called with on the second rank."""
    return on_rows_of_the_set(accelerator(1, **given), inputs, lambda rows: rows)


@pytest.mark.parametrize(
    "inputs",
    [
        {"input_ids": IDS, "labels": IDS},
        {"input_ids": IDS, "names": ["a", "b", "c"], "margin": torch.ones(SAMPLES)},
        {"input_ids": IDS, "return_loss": True, "scale": 0.5, "kind": None},
        BatchEncoding({"input_ids": IDS}),
    ],
    ids=["tensors", "lists", "settings", "encoding"],
)
def test_rows_that_are_samples_are_there_once(inputs: Any) -> None:
    found = seen(inputs)
    assert type(found) is type(inputs) and found.keys() == inputs.keys()
    assert torch.equal(found["input_ids"], IDS[:1])
    assert all(len(value) == 1 for value in found.values() if isinstance(value, (torch.Tensor, list)))
    assert found.get("return_loss") is inputs.get("return_loss")


@pytest.mark.parametrize(
    "inputs",
    [
        {"input_ids": torch.cat([IDS, IDS]), "attention_mask": torch.cat([IDS, IDS])},
        {"input_ids": IDS, "pixel_values": torch.zeros(5, 8), "image_grid_thw": torch.ones(4, 3)},
        {"input_ids": IDS, "images": [[torch.zeros(3)], []]},
        {"input_ids": IDS.view(1, -1), "position_ids": IDS.view(1, -1)},
        {"input_ids": IDS, "tokens": torch.tensor(7)},
        {"input_ids": IDS, "nested": {"a": IDS}},
        {"return_loss": True},
        [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}],
        (IDS, IDS),
    ],
    ids=["pairs", "patches", "lists", "packed", "number", "nested", "no_rows", "raw", "tuple"],
)
def test_other_batches_are_computed_as_they_are(inputs: Any) -> None:
    assert seen(inputs) is inputs


def test_ranks_with_all_or_no_new_samples_compute_theirs_and_know_that_another_is_shorter() -> None:
    for rank, remainder in ((0, 4), (1, 2), (0, 3), (1, 3)):
        here = accelerator(rank, remainder)
        inputs = {"input_ids": IDS}
        assert on_rows_of_the_set(here, inputs, lambda rows: rows) is inputs
        assert here.shorter_batch.is_here(here.gradient_state)
        here.gradient_state.active_dataloader = None
        assert not here.shorter_batch.is_here(here.gradient_state)


def test_a_loader_that_names_no_batch_size_and_a_set_that_needs_no_filling_are_left_alone() -> None:
    inputs = {"input_ids": IDS}
    assert seen(inputs, loader=Loader(0)) is inputs
    assert seen(inputs, remainder=0) is inputs and seen(inputs, remainder=-1) is inputs


def test_a_loss_that_gathers_by_itself_keeps_whole_batches() -> None:
    gathering = nn.Module()
    gathering.inner = nn.Linear(1, 1)
    gathering.inner.gather_across_devices = True  # type: ignore[assignment]
    assert gathers_by_itself(gathering) and gathers_by_itself({"a": nn.Linear(1, 1), "b": gathering})
    assert not gathers_by_itself(nn.Linear(1, 1)) and not gathers_by_itself(None)
