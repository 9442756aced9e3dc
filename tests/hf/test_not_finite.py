"""A run whose weights become nan: told once with step and parameter, the last finite checkpoint kept, ended on request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_dist.checkpoint.finite import first_not_finite
from hf_dist.checkpoint.owned_part import OwnedPart
from hf_dist.optim.not_finite import NotFinite
from hf_dist.tensors.tensor_slice import TensorSlice
from tests.covering import some_of
from tests.hf.layout_jobs import matrices, stages
from tests.hf.on_ranks import Job, found, outcomes_by_world

STOPS = {"hf_dist": {"stop_if_not_finite": True}}


def job(stage: int, config: dict[str, Any], **changes: Any) -> Job:
    return ("tests.hf.poisoned:poisoned", {"stage": stage, "config": config, **changes})


GOES_ON = {"z1": job(1, {}), "z3": job(3, {"checkpoint": {"async_save": True}}), "pp": job(0, stages(2))}
STOPPED = {"z3": job(3, STOPS), "tp, rarely logged": job(1, {**matrices(2), **STOPS}, logging_steps=5, save_steps=2)}
GOES_ON, STOPPED = some_of(GOES_ON, "z3", "pp"), some_of(STOPPED, "tp, rarely logged")
JOBS = {2: [*GOES_ON.values(), *STOPPED.values()]}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return outcomes_by_world(JOBS, tmp_path_factory)


@pytest.mark.parametrize("name", GOES_ON)
def test_it_is_told_and_the_last_finite_checkpoint_is_kept(name: str, outcomes: Any) -> None:
    ranks = found(outcomes, 2, GOES_ON[name])
    for rank in ranks:
        assert rank["error"] == ""
        assert rank["left"] == ["checkpoint-2", "checkpoint-6"]
        assert rank["bad"]["checkpoint-2"] is None
        assert rank["bad"]["checkpoint-6"] is not None
    said = ranks[0]["said"]
    assert [line for line in said if "since step 3, first model." in line] == said[:1]
    assert sum("its weights are not finite" in line for line in said) == 4, "each checkpoint from step 3 on"


@pytest.mark.parametrize("name", STOPPED)
def test_it_ends_on_every_rank_before_a_checkpoint_of_such_weights(name: str, outcomes: Any) -> None:
    for rank in found(outcomes, 2, STOPPED[name]):
        assert rank["error"].startswith("ModelError: weights are not finite since step 3, first model."), rank["error"]
        assert rank["left"][-1] == "checkpoint-2"
        assert set(rank["bad"].values()) == {None}


def part(name: str, values: torch.Tensor) -> OwnedPart:
    return OwnedPart(name, TensorSlice.all(values.shape), 0, values.numel(), values)


def test_large_numbers_are_finite_and_frozen_infinities_are_wanted() -> None:
    large, bad = torch.full((8,), 3e38), torch.tensor([1.0, float("inf")])
    assert first_not_finite([part("large", large), part("mask", bad)], {"large"}) is None
    assert first_not_finite([part("large", large), part("bad", bad)], {"large", "bad"}) == "bad"


def test_the_first_step_is_remembered_and_forgotten() -> None:
    seen = NotFinite()
    for step, norm in enumerate((1.0, 2.0, float("nan"), 1.0, float("inf")), 1):
        seen.note(torch.tensor(norm), step)
        assert seen.step == (3 if step >= 3 else 0)
    seen.forget()
    assert seen.step == 0
