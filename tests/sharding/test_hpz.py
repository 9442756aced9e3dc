"""A second copy of the weights among neighbours: the same numbers bit for bit, bytes held and sent by the formula."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.covering import FULL_GRID, some_of
from tests.harness import run_ranks
from tests.sharding.test_accounting import Net

WORLD, NEIGHBOURS, STEPS = 4, 2, 3 if FULL_GRID else 2
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16, accumulated": {"bf16": {"enabled": True}, "gradient_accumulation_steps": 3},
    "frozen blocks": {"freeze": True},
    "written by one rank": {"write": True},
    "weights on the host": {"zero_optimization": {"offload_param": {"device": "cpu"}}},
    "evaluated": {"evaluate": True},
    "loaded": {"reload": True},
    "stepped in backward": {"hf_dist": {"optimizer_in_backward": True}},
}
CASES = some_of(CASES, "bf16, accumulated", "frozen blocks", "written by one rank", "weights on the host", "loaded")


def train(rank: int, second: int, case: dict[str, Any]) -> dict[str, Any]:
    """Some steps; losses, weights, and what the last step sent over which axis."""
    import hf_dist
    from hf_dist.dist import comm_counter
    from hf_dist.planning.comm_volume import step_traffic
    from hf_dist.planning.optimizer_states import OptimizerStates
    from hf_dist.planning.state_bytes import States
    from hf_dist.sharding.full_params import load_full_tensor

    torch.manual_seed(0)
    case = dict(case)
    extras = {key: case.pop(key, False) for key in ("freeze", "write", "evaluate", "reload")}
    accumulation = case.get("gradient_accumulation_steps", 1)
    model = Net()
    if extras["freeze"]:
        model.blocks[:2].requires_grad_(False)
    zero = {"stage": 3, "zero_hpz_partition_size": second, **case.pop("zero_optimization", {})}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        **case,
    }
    engine = hf_dist.initialize(model, config=config)
    losses = []
    with comm_counter.record() as log:
        for step in range(STEPS):
            ids = (torch.arange(12).view(2, 6) + 7 * rank + step) % 53
            log.entries.clear()
            for _ in range(accumulation):
                loss = nn.functional.cross_entropy(engine(ids).float().flatten(0, 1), ids.flatten())
                engine.backward(loss)
                engine.step()
                losses.append(float(loss))
            sent = {
                axis: sum(e.nbytes for e in log.entries if e.op == "all_gather" and e.axis == axis)
                for axis in ("shard", "neighbours")
            }
            if extras["write"]:
                with hf_dist.gathered(model, modifier_rank=1), torch.no_grad():
                    if rank == 1:
                        model.blocks[1].up.weight.mul_(0.5)
            if extras["evaluate"]:
                with torch.no_grad():
                    losses.append(float(engine(ids).float().sum()))
            if extras["reload"]:
                with torch.no_grad():
                    engine(ids)  # the copy is of these weights, not of those that follow
                for group in engine.sharded.groups:
                    for slot in group.layout.slots:
                        load_full_tensor(group, slot, torch.full(slot.shape, 0.01 * (step + 1)))
                engine.sharded.weights_changed()
    states = States.of_engine(engine.sharded, engine.config, OptimizerStates.of_config(engine.config))
    plan = step_traffic(states, accumulation=accumulation)
    weights = {}
    with hf_dist.gathered(model):
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = [
        (u.is_root, u.index, g.layout.numel, g.full.values.element_size())
        for u in engine.sharded.units
        for g in u.groups
    ]
    return {
        "losses": losses, "weights": weights, "sent": sent, "planned": plan["all_gather"][1], "groups": groups,
        "second": sum(g.rest.second.nbytes for g in engine.sharded.groups if g.rest.second is not None),
        "replicas": engine.mesh.axes.size("dp_replicate"),
    }  # fmt: skip


def both(rank: int, world: int, names: list[str]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Every case without and with a second copy."""
    return [(train(rank, 1, CASES[name]), train(rank, NEIGHBOURS, CASES[name])) for name in names]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """By case: of every rank, without and with."""
    ranks = run_ranks(both, WORLD, (list(CASES),), timeout=400)
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_without_it_bit_for_bit(case: str, found: Any) -> None:
    for plain, second in found[case]:
        assert plain["losses"] == second["losses"]
        assert second["replicas"] == 1
        for name, value in plain["weights"].items():
            assert torch.equal(value, second["weights"][name]), name


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_its_part_of_the_copy_more(case: str, found: Any) -> None:
    for plain, second in found[case]:
        assert plain["second"] == 0
        assert second["second"] == sum(numel // NEIGHBOURS * width for _, _, numel, width in second["groups"])


def gathers(result: dict[str, Any], accumulation: int) -> Iterator[tuple[int, int]]:
    """Bytes of every group, and how often a step gathers it."""
    last = max(index for _, index, _, _ in result["groups"])
    for is_root, index, numel, width in result["groups"]:
        stays = is_root or index == last  # from forward to backward
        yield numel * width, accumulation * (1 if stays else 2)


COUNTED = {"fp32": 1, "bf16, accumulated": 3, "weights on the host": 1}


@pytest.mark.parametrize(("case", "accumulation"), [item for item in COUNTED.items() if item[0] in CASES])
def test_only_the_first_gather_of_a_step_leaves_the_neighbours(case: str, accumulation: int, found: Any) -> None:
    for plain, second in found[case]:
        assert plain["sent"]["neighbours"] == 0
        assert plain["sent"]["shard"] == sum(
            nbytes * (WORLD - 1) // WORLD * count for nbytes, count in gathers(plain, accumulation)
        )
        assert second["sent"] == {
            "shard": sum(nbytes * (WORLD - 1) // WORLD for nbytes, _ in gathers(second, accumulation)),
            "neighbours": sum(
                nbytes * (NEIGHBOURS - 1) // NEIGHBOURS * (count - 1) for nbytes, count in gathers(second, accumulation)
            ),
        }
        assert sum(second["sent"].values()) == second["planned"] < plain["planned"] == sum(plain["sent"].values())


def test_frozen_weights_leave_the_neighbours_never_again(found: Any) -> None:
    for plain, second in found["frozen blocks"]:
        assert sum(second["sent"].values()) == second["planned"]
        assert second["sent"]["shard"] < plain["sent"]["shard"] / 2
