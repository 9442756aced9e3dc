"""What runs beside computation on a GPU, seen by what is waited for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hf_dist
from hf_dist.config import AutoSources, load_config, resolve, resolve_without_trainer
from hf_dist.engine.build import in_flight_limits
from hf_dist.optim.clip import EarlyNorms, owned_norms
from hf_dist.planning.planner import Planner, Workload
from hf_dist.planning.temporary import Temporary
from hf_dist.sharding.runtime import ShardedModel
from hf_dist.sharding.unit import ShardUnit
from tests.planning.test_estimate import llama


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
        flying.append(Temporary(states).in_flight([u.learning for u in states.units]))
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


class Headed(nn.Module):
    """Two blocks, and a head whose weight is read with or without a call of its module."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.calls = calls
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (self.head(x) if self.calls else nn.functional.linear(x, self.head.weight)).square().sum()


def trained(stage: int, calls: bool = True, steps: int = 3) -> tuple[Any, dict[str, torch.Tensor]]:
    """An engine after some steps of a fused AdamW, and its weights."""
    torch.manual_seed(0)
    model = Headed(calls)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    config = {"train_batch_size": 1, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.1}
    engine = hf_dist.initialize(model, config=config, optimizer=optimizer)
    for _ in range(steps):
        engine.backward(engine(torch.ones(1, 4)))
        engine.step()
    with hf_dist.gathered(model):
        return engine, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("calls", [True, False])
def test_a_head_is_gathered_when_its_turn_comes_however_it_is_read(stage: int, calls: bool) -> None:
    """In front of everything else, its gather would keep the first block waiting."""
    engine, weights = trained(stage, calls)
    (orders,) = engine.sharded.passes.kinds
    assert orders.agreed
    assert orders.forward.units == [1, 2, 0]
    assert orders.forward.last == 2, "the block that stays for backward"
    _, expected = trained(0)
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name])


@pytest.mark.parametrize("stage", [1, 2])
def test_what_the_next_forward_reads_first_is_stepped_and_gathered_before_the_rest(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = trained(stage)
    seen: list[str] = []
    monkeypatch.setattr(ShardedModel, "read_first", lambda self: self._in_order_of_use()[0])
    ahead, step = ShardedModel.gather_ahead, torch.optim.AdamW.step
    monkeypatch.setattr(ShardedModel, "gather_ahead", lambda self, unit: seen.append(unit.name) or ahead(self, unit))
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: seen.append("step") or step(self))
    engine, weights = trained(stage)
    assert seen[-3:] == ["step", "blocks.0", "step"]
    assert [int(state["step"]) for state in engine.optimizer.state.values()] == [3] * 5
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name])


def test_only_gpus_that_gather_after_a_step_divide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for stage in range(4):
        sharded = engine_of(stage).sharded
        assert sharded.read_first() is None
        sharded.mesh = replace(sharded.mesh, device=torch.device("cuda:0"))
        assert (sharded.read_first() is not None) is (stage in (1, 2))


def test_norms_of_what_has_arrived_are_made_beside_the_last_reductions_unless_somebody_writes() -> None:
    engine, _ = trained(3)
    engine.backward(engine(torch.ones(1, 4)))
    sharded = engine.sharded
    early = EarlyNorms.of(sharded)
    arrived = [g for g in sharded.trainable_groups if id(g) in early.found]
    assert 0 < len(arrived) < len(sharded.trainable_groups), "the last ones are on their way"
    assert early.valid(sharded.trainable_groups).keys() == {id(g) for g in arrived}
    arrived[0].grad.mul_(2)
    assert early.valid(sharded.trainable_groups).keys() == {id(g) for g in arrived[1:]}
    sharded.finish_gradients()
    fresh = owned_norms(sharded, {})
    assert [float(n) for n in owned_norms(sharded, early.valid(sharded.trainable_groups))] == [float(n) for n in fresh]
