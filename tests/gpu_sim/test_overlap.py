"""What runs beside computation on a GPU, seen by what is waited for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hf_dist
from hf_dist.sharding.unit import ShardUnit


def engine_of(stage: int, **zero: Any) -> Any:
    """On the CPU, a root and four blocks."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
    model = nn.ModuleDict({"head": nn.Linear(4, 4), "blocks": blocks})
    config = {"train_batch_size": 1, "zero_optimization": {"stage": stage, **zero}}
    return hf_dist.initialize(model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


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
