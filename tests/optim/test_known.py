"""Optimizers that know their parameters by place, key, id, attribute or flag; several of one model; loops over groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_dist
from hf_dist.errors import ConfigError, ModelError
from tests.covering import cells
from tests.harness import run_ranks
from tests.optim import known_jobs
from tests.window.nets import Blocks, config

CASES = cells({"name": tuple(known_jobs.cases()), "stage": (0, 1, 3)}, 1)
"""The stages in turn; in one process, every case at stage 1 with the states on the host."""


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.fixture(scope="module")
def two_ranks() -> list[Any]:
    """What two ranks found."""
    return run_ranks(known_jobs.on_ranks, 2, ([(cell["name"], cell["stage"]) for cell in CASES],))


@pytest.mark.parametrize(("name", "stage"), [(*cell.values(),) for cell in CASES])
def test_two_ranks_give_the_weights_of_one_process(name: str, stage: int, two_ranks: list[Any]) -> None:
    make, loop = known_jobs.cases()[name]
    wanted = known_jobs.on_torch(make, loop, 2)
    for rank in two_ranks:
        assert isinstance(rank[name, stage], torch.Tensor), rank[name, stage]
        close(rank[name, stage], wanted)


@pytest.mark.parametrize("name", known_jobs.cases())
def test_one_rank_gives_the_weights_of_torch_with_the_states_on_the_host(name: str) -> None:
    make, loop = known_jobs.cases()[name]
    settings = config(1)
    if name != "known by flags in the state":  # needs whole tensors, which are not offloaded
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    close(known_jobs.prepared(make, loop, 0, 1, settings), known_jobs.on_torch(make, loop, 1))


def test_two_optimizers_resume_in_another_layout(tmp_path: Path) -> None:
    wanted = run_ranks(known_jobs.saved_by_two, 2, (str(tmp_path / "c"), 2))[0]
    close(known_jobs.resumed_by_two(0, 1, str(tmp_path / "c"), 0), wanted)
    for found in run_ranks(known_jobs.resumed_by_two, 2, (str(tmp_path / "c"), 3)):
        close(found, wanted)


def test_what_two_optimizers_keep_is_what_the_plan_counts() -> None:
    from hf_dist.planning.optimizer_states import OptimizerStates
    from hf_dist.planning.state_bytes import States

    model, engine = known_jobs._two_engines(1)
    known_jobs._steps(engine, model, 0, 1, 0)
    states = States.of_engine(
        engine.sharded, engine.config, OptimizerStates.of_attached(engine.fragments, engine.config)
    )
    assert sum(states.nbytes.optimizer.values()) == sum(engine.fragments.resident_nbytes().values())


def test_one_parameter_in_two_optimizers_is_refused_by_name() -> None:
    model = Blocks()
    pair = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.head.parameters(), lr=0.1)]
    with pytest.raises(ModelError, match=r"head\.bias is in two optimizers"):
        hf_dist.initialize(model, config=config(1), optimizer=pair)


def test_the_step_in_backward_takes_one_optimizer() -> None:
    model = Blocks()
    settings = config(2, hf_dist={"optimizer_in_backward": True})
    with pytest.raises(ConfigError, match=r"optimizer_in_backward.*takes one optimizer"):
        hf_dist.initialize(model, config=settings, optimizer=known_jobs.two(model))


def refusals(rank: int, world: int) -> list[str]:
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = hf_dist.initialize(model, config=config(1), optimizer=optimizer)
    said = []
    reads: list[Any] = [lambda p: p.detach(), lambda p: p.data, lambda p: p.norm()]
    for read in reads:
        try:
            for p in optimizer.param_groups[0]["params"]:
                read(p)
        except ModelError as error:
            said.append(str(error))
    assert engine.global_steps == 0
    return said


def test_weights_read_through_groups_are_refused_where_a_rank_has_a_part() -> None:
    for said in run_ranks(refusals, 2):
        assert len(said) == 3
        assert all(
            "in optimizer.param_groups: this rank steps" in text and "model.parameters()" in text for text in said
        )
