"""What runs beside computation on a GPU, seen by what is waited for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hf_dist
from hf_dist.build import in_flight_limits
from hf_dist.config import AutoSources, load_config, resolve, resolve_without_trainer
from hf_dist.estimate.planner import Planner, Workload
from hf_dist.sharding.unit import ShardUnit
from tests.test_estimate import llama


def engine_of(stage: int, **zero: Any) -> Any:
    """On the CPU, a root and four blocks."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
    model = nn.ModuleDict({"head": nn.Linear(4, 4), "blocks": blocks})
    config = {"train_batch_size": 1, "zero_optimization": {"stage": stage, **zero}}
    return hf_dist.initialize(model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("written", [{}, {"overlap_comm": "auto"}, {"overlap_comm": False}])
def test_reductions_run_beside_backward_on_gpus_unless_the_file_says_no(stage: int, written: dict[str, Any]) -> None:
    loaded = load_config({"zero_optimization": {"stage": stage, **written}})
    fly = written.get("overlap_comm") is not False
    for on_gpu in (False, True):
        beside = fly and (on_gpu or stage == 3)
        without = resolve_without_trainer(loaded, on_gpu=on_gpu)
        trainer = resolve(loaded, AutoSources(on_gpu=on_gpu), final=True)
        for config in (without, trainer):
            assert config.zero_optimization.overlap_comm is beside
            assert (in_flight_limits(config).reduce > 0) is beside


def test_the_plan_counts_gradients_that_fly_on_gpus() -> None:
    with torch.device("meta"):
        model = llama()
    loaded = load_config({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}})
    flying = []
    for on_gpu in (False, True):
        config = resolve_without_trainer(loaded, on_gpu=on_gpu)
        states = Planner(model, 2, Workload(1, 16)).plan(config).states
        flying.append(states._in_flight([u.learning for u in states.units]))
    assert flying[0] == 0 < flying[1]


@pytest.mark.parametrize(("device", "waited"), [("cpu", 4), ("cuda:0", 0)])
@pytest.mark.parametrize("stage", [1, 2])
def test_gathers_after_a_step_are_not_limited_on_a_gpu(
    stage: int, device: str, waited: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded = engine_of(stage, allgather_bucket_size=1).sharded
    assert len(sharded.units) == 5
    sharded.mesh = replace(sharded.mesh, device=torch.device(device))
    waits: list[ShardUnit] = []
    wait = ShardUnit.wait_unshard
    monkeypatch.setattr(ShardUnit, "wait_unshard", lambda unit: waits.append(unit) or wait(unit))
    sharded.weights_changed()
    assert len(waits) == waited
