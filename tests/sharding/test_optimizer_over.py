"""The optimizer over all copies of a shard: the same numbers bit for bit, bytes held and sent by the formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.covering import FULL_GRID, some_of
from tests.harness import run_ranks
from tests.sharding.test_accounting import Net

WORLD, SHARDS, COPIES, STEPS = 4, 2, 2, 3 if FULL_GRID else 2
CASES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 2, bf16": {"stage": 2, "bf16": {"enabled": True}},
    "stage 3": {},
    "bf16, accumulated": {"bf16": {"enabled": True}, "gradient_accumulation_steps": 3},
    "bf16 on the wire": {
        "bf16": {"enabled": True},
        "communication_data_type": "bf16",
        "gradient_accumulation_steps": 3,
    },
    "fp16, skipped": {
        "fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1},
        "gradient_accumulation_steps": 3,
    },
    "frozen blocks": {"freeze": True},
    "written by one rank": {"write": True, "bf16": {"enabled": True}},
    "weights on the host": {"offload_param": {"device": "cpu"}, "bf16": {"enabled": True}},
    "optimizer on the host": {"offload_optimizer": {"device": "cpu"}, "bf16": {"enabled": True}, "acc": 3},
    "both on the host": {
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 3,
    },
    "optimizer on disk": {"offload_optimizer": {"device": "nvme"}, "bf16": {"enabled": True}},
    "evaluated": {"evaluate": True},
    "loaded": {"reload": True, "bf16": {"enabled": True}},
    "once": {"gradient_accumulation_steps": 3, "hf_dist": {"reduce_once_per_window": True}},
    "states in bf16": {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
    "no masters": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "no masters, stage 2": {"stage": 2, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "in backward": {"hf_dist": {"optimizer_in_backward": True}},
}
CASES["optimizer on the host"]["gradient_accumulation_steps"] = CASES["optimizer on the host"].pop("acc")
CASES = some_of(
    CASES,
    *("stage 2, bf16", "bf16, accumulated", "fp16, skipped", "frozen blocks", "written by one rank"),
    *("both on the host", "optimizer on disk"),
)
ZERO = ("stage", "offload_param", "offload_optimizer")


def train(rank: int, over: bool, case: dict[str, Any], folder: str) -> dict[str, Any]:
    """Some steps; losses, norms, gradients and weights, and what the last step sent over which axis."""
    import hf_dist
    from hf_dist.dist import comm_counter
    from hf_dist.engine.report import start_up_report
    from hf_dist.memory.offload.resting import Tier
    from hf_dist.planning.comm_volume import state_traffic
    from hf_dist.planning.state_bytes import States
    from hf_dist.sharding.full_params import load_full_tensor
    from hf_dist.sharding.group_axes import pieces_of

    torch.manual_seed(0)
    case = {key: dict(value) if isinstance(value, dict) else value for key, value in case.items()}
    extras = {key: case.pop(key, False) for key in ("freeze", "write", "evaluate", "reload")}
    accumulation = case.get("gradient_accumulation_steps", 1)
    model, other = Net(), Net()
    if extras["freeze"]:
        model.blocks[:2].requires_grad_(False)
        other.blocks[:2].requires_grad_(False)
    zero = {"stage": 3, "mics_shard_size": SHARDS, **{key: case.pop(key) for key in ZERO if key in case}}
    zero = zero if over else {**zero, "stage": 3}  # where copies hold all of it, others are not built
    if zero.get("offload_optimizer", {}).get("device") == "nvme":
        zero["offload_optimizer"]["nvme_path"] = folder
    section = {**case.pop("hf_dist", {}), **({"optimizer_over": "all"} if over else {})}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0 if section.get("optimizer_in_backward") else 1e9,  # a norm, and no factor
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        "hf_dist": section,
        **case,
    }
    engine = hf_dist.initialize(model, config=config)
    pieces = pieces_of(engine.mesh.axes, engine.sharded.placements.copies)
    states = States.of_model(other, engine.config, num_shards=SHARDS, rank=engine.mesh.shard.rank, pieces=pieces)
    losses: list[float] = []
    gradients: list[torch.Tensor] = []
    with comm_counter.record() as log:
        for step in range(STEPS):
            ids = (torch.arange(12).view(2, 6) + 7 * rank + step) % 53
            log.entries.clear()
            for _ in range(accumulation):
                loss = nn.functional.cross_entropy(engine(ids).float().flatten(0, 1), ids.flatten())
                engine.backward(loss)
                if step + 1 < STEPS and engine.is_gradient_accumulation_boundary():
                    whole = hf_dist.full_gradient(model.head.weight)
                    gradients += [] if whole is None else [whole.clone()]
                engine.step()
                losses.append(float(loss))
            sent = {(e.axis, e.op): 0 for e in log.entries}
            for e in log.entries:
                sent[e.axis, e.op] += e.nbytes
            if extras["write"]:
                with hf_dist.gathered(model, modifier_rank=1), torch.no_grad():
                    if rank == 1:
                        model.blocks[1].up.weight.mul_(0.5)
            if extras["evaluate"]:
                with torch.no_grad():
                    losses.append(float(engine(ids).float().sum()))
            if extras["reload"]:
                for group in engine.sharded.groups:
                    for slot in group.layout.slots:
                        load_full_tensor(group, slot, torch.full(slot.shape, 0.01 * (step + 1)))
                engine.sharded.weights_changed()
    planned = {
        (axis, op): nbytes
        for axis, crossed in state_traffic(states, engine.mesh.axes).items()
        for op, (_, nbytes) in crossed.items()
    }
    weights = {}
    told = [line.strip() for line in start_up_report(engine).splitlines() if "copies" in line or "copy of" in line]
    with hf_dist.gathered(model):
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {
        "losses": losses, "norm": engine.get_global_grad_norm(), "gradients": gradients, "weights": weights, "sent": sent,
        "planned": planned, "skipped": engine.skipped_steps, "told": told, "resident": engine.resident_nbytes(),
        "planned_resident": {tier.value: states.nbytes.resident(tier) for tier in Tier},
        "trained": [(g.layout.numel, g.dtype.itemsize) for g in engine.sharded.trainable_groups],
        "masters": sum(stop - start for start, stop in (g.resting for g in engine.sharded.trainable_groups)),
    }  # fmt: skip


def looked_at(over: bool) -> list[float]:
    """What user code sees and changes of gradients in a window and at its end: norms, clipping, products, own values."""
    import hf_dist

    torch.manual_seed(0)
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "mics_shard_size": SHARDS},
        "hf_dist": {"optimizer_over": "all" if over else "shard"},
    }
    engine = hf_dist.initialize(model, config=config)
    head, up, down = model.head.weight, model.blocks[0].up.weight, model.blocks[1].down.weight
    seen: list[Any] = []
    for step in range(2):
        for k in range(2):
            ids = (torch.arange(12).view(2, 6) + 7 * engine.mesh.dp.rank + step + 3 * k) % 53
            engine.backward(nn.functional.cross_entropy(engine(ids).float().flatten(0, 1), ids.flatten()))
            seen += [head.grad.norm(), head.grad.norm(float("inf"))]
            if k:
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
                head.grad.mul_(0.5)
                up.grad = torch.full(up.shape, 0.01)
                down.grad = None
                seen += [hf_dist.full_gradient(p).norm() for p in (head, up)]
            engine.step()
    with hf_dist.gathered(model):
        return [*map(float, seen), *(float(p.norm()) for p in model.parameters())]


def both(rank: int, world: int, names: list[str], folder: str) -> list[tuple[Any, Any]]:
    """Every case with copies that hold all of the optimizer's state, and with copies that hold pieces; what user code sees."""
    return [(looked_at(False), looked_at(True))] + [
        (train(rank, False, CASES[name], folder), train(rank, True, CASES[name], folder)) for name in names
    ]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By case: of every rank, without and with."""
    folder = str(tmp_path_factory.mktemp("states"))
    ranks = run_ranks(both, WORLD, (list(CASES), folder), timeout=400)
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(["user code", *CASES])}


def test_user_code_sees_and_changes_the_same_gradients(found: Any) -> None:
    for plain, over in found["user code"]:
        assert over == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_copies_that_hold_all_of_it(case: str, found: Any) -> None:
    for plain, over in found[case]:
        assert over["losses"] == plain["losses"]
        assert over["norm"] == pytest.approx(plain["norm"], rel=1e-6)
        assert over["skipped"] == plain["skipped"] and (over["skipped"] > 0) == ("skipped" in case)
        for mine, theirs in zip(over["gradients"], plain["gradients"], strict=True):
            assert torch.equal(mine, theirs)
        for name, value in plain["weights"].items():
            assert torch.equal(value, over["weights"][name]), name


@pytest.mark.parametrize("case", CASES)
def test_copies_exchange_one_gradient_and_one_set_of_weights_in_a_step(case: str, found: Any) -> None:
    for _, over in found[case]:
        between = {op: nbytes for (axis, op), nbytes in over["sent"].items() if axis == "dp_replicate"}
        if "skipped" not in case:  # which gathers nothing
            wire = 2 if "no masters" in case else 4  # gradients rest in bf16 then
            assert between == {
                "reduce_scatter": sum(wire * numel // SHARDS * (COPIES - 1) // COPIES for numel, _ in over["trained"]),
                "all_gather": sum(width * numel // SHARDS * (COPIES - 1) // COPIES for numel, width in over["trained"]),
            }
            weights = {key: n for key, n in over["sent"].items() if key[0] in ("shard", "dp_replicate")}
            assert weights == {key: n for key, n in over["planned"].items() if key[0] in ("shard", "dp_replicate")}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_its_piece_of_masters_and_states(case: str, found: Any) -> None:
    for plain, over in found[case]:
        numel = sum(numel for numel, _ in over["trained"]) // (SHARDS * COPIES)
        assert over["masters"] == numel
        assert math.isclose(over["masters"] * COPIES, plain["masters"], rel_tol=0.2)  # padding
    for _, over in found[case][:SHARDS]:  # the first copy is planned: the last pieces have the padding
        assert over["resident"] == over["planned_resident"]


def test_the_report_says_what_the_key_does(found: Any) -> None:
    plain, over = found["bf16, accumulated"][0]
    said = "masters and optimizer state of a shard are cut among its 2 copies, which exchange pieces once in a step"
    assert said in over["told"] and said not in plain["told"]


def test_the_report_says_that_one_copy_changes_nothing() -> None:
    import hf_dist
    from hf_dist.engine.report import start_up_report

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "mics_shard_size": 1},
        "hf_dist": {"optimizer_over": "all"},
    }
    engine = hf_dist.initialize(Net(), config=config, device="cpu")
    assert "one copy of the shards, so hf_dist.optimizer_over changes nothing" in start_up_report(engine)
