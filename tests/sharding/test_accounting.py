"""Bytes held and bytes sent equal the formulas, exactly, at every ZeRO stage."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from hf_dist.sharding.placement import ZERO_STAGES, Placement
from tests.covering import FULL_GRID, cells
from tests.harness import run_ranks

WORLDS = (1, 2, 3, 4) if FULL_GRID else (1, 2, 3)
PRECISIONS = ("fp32", "bf16")
DIM = 48


class Block(nn.Module):
    """A residual layer with two matrices, a bias and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM, bias=False)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pre-norm MLP."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, four blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(53, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(DIM, 53)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def measure(rank: int, world: int, stage: int, precision: str, accumulation: int) -> dict[str, Any]:
    """Train three steps; count the third. Bytes at rest are taken from the tensors that exist."""
    import hf_dist
    from hf_dist.dist import comm_counter

    torch.manual_seed(0)
    model = Net()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": precision == "bf16"},
    }
    engine = hf_dist.initialize(model, config=config)
    sharded = engine.sharded
    ids = torch.arange(12).view(2, 6) + rank
    held: dict[str, Any] = {}
    with comm_counter.record() as log:
        for _ in range(3):
            log.entries.clear()
            for _ in range(accumulation):
                loss = nn.functional.cross_entropy(engine(ids).float().flatten(0, 1), ids.flatten())
                engine.backward(loss)
                if engine.is_gradient_accumulation_boundary():
                    sharded.finish_gradients()
                    held["grads"] = sum(g.grad.numel() * 4 for g in sharded.groups if g.grad is not None)
                    held["partial"] = sum(g.window.values is not None for g in sharded.groups)
                engine.step()
        model(ids)  # the gathers that follow the step belong to it
        sent = {op: log.nbytes(op) for op in ("all_gather", "reduce_scatter")}
        reduced = sum(e.nbytes for e in log.entries if e.op == "all_reduce" and e.axis == "shard")
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for g in sharded.groups
        for t in (g.full.values, g.source)
        if t.untyped_storage().nbytes()
    }
    sharded.weights_changed()
    assert engine.optimizer is not None
    state = sum(
        t.numel() * t.element_size() for s in engine.optimizer.state.values() for t in s.values() if t.dim() == 1
    )
    units = [
        {"numel": sum(g.layout.numel for g in u.groups), "root": u.is_root, "last": u.index == len(sharded.units) - 1}
        for u in sharded.units
    ]
    fragments = sum(f.stop - f.start for f in engine.fragments.fragments) if engine.fragments else 0
    padding = sum(g.layout.numel - g.layout.num_params for g in sharded.groups)
    return {
        "held": held, "sent": sent, "all_reduced": reduced, "state": state, "fragments": fragments, "units": units,
        "weights": sum(storages.values()), "padding": padding, "slots": sum(len(g.params) for g in sharded.groups),
        "groups": len(sharded.groups), "params": sum(g.layout.num_params for g in sharded.groups),
    }  # fmt: skip


CASES = [(*cell.values(),) for cell in cells({"stage": tuple(ZERO_STAGES), "precision": PRECISIONS, "acc": (1, 3)})]


class Few(nn.Module):
    """Two layers of fewer elements than a block, so that some ranks have only padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(53, 3), nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 53, bias=False)

    forward = Net.forward


BLOCK = 64
WIRES: dict[str, dict[str, Any]] = {
    "int8": {"weights": "int8", "gradients": "int8", "block": BLOCK},
    "int4-feedback": {"weights": "fp8_e4m3", "gradients": "int4", "error_feedback": True, "block": BLOCK},
}
ENCODED = [
    (*cell.values(),) for cell in cells({"stage": tuple(ZERO_STAGES), "wires": tuple(WIRES), "model": ("Net", "Few")})
]


def measure_encoded(rank: int, world: int, stage: int, wires: str, model: str) -> dict[str, Any]:
    """Bytes of the second of two steps, by axis and operation, and between steps: those that exist and those of the plan."""
    import hf_dist
    from hf_dist.dist import comm_counter
    from hf_dist.memory.offload.resting import Tier
    from hf_dist.planning.comm_volume import state_traffic
    from hf_dist.planning.optimizer_states import OptimizerStates
    from hf_dist.planning.state_bytes import States

    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "hf_dist": {"wires": WIRES[wires]},
    }
    engine = hf_dist.initialize(Net() if model == "Net" else Few(), config=config)
    ids = torch.arange(12).view(2, 6) + rank
    with comm_counter.record() as log:
        for _ in range(2):
            log.entries.clear()
            engine.backward(nn.functional.cross_entropy(engine(ids).flatten(0, 1), ids.flatten()))
            engine.step()
    sent: dict[str, dict[str, int]] = {}
    for entry in log.entries:
        own = sent.setdefault(entry.axis, {})
        own[entry.op] = own.get(entry.op, 0) + entry.nbytes
    resident = engine.resident_nbytes()["device"]
    sharded = engine.sharded
    sharded.finish_gathers()
    states = States.of_engine(sharded, engine.config, OptimizerStates.of_attached(engine.fragments, engine.config))
    planned = state_traffic(states, engine.mesh.axes)
    return {
        "sent": sent["shard"] if world > 1 else {},
        "planned": {op: nbytes for op, (_, nbytes) in planned.get("shard", {}).items()},
        "resident": resident, "said": states.nbytes.resident(Tier.DEVICE),
        "kept": states.nbytes.residuals[Tier.DEVICE],
        "parts": [g.layout.shard_numel for g in sharded.groups],
    }  # fmt: skip


def measure_all(rank: int, world: int) -> list[dict[str, Any]]:
    """Every case in one spawn."""
    found = [measure(rank, world, *case) for case in CASES]
    return found + [measure_encoded(rank, world, *case) for case in ENCODED]


@functools.cache
def measured(world: int) -> list[list[dict[str, Any]]]:
    """By rank, by case."""
    return run_ranks(measure_all, world)


grid = pytest.mark.parametrize("world", WORLDS)
cases = pytest.mark.parametrize(
    ("index", "case"), list(enumerate(CASES)), ids=[f"z{s}-{p}-acc{a}" for s, p, a in CASES]
)


@grid
@cases
def test_bytes_held_per_rank(world: int, index: int, case: tuple[int, str, int]) -> None:
    stage, precision, _ = case
    place = ZERO_STAGES[stage]
    total_state = 0
    for rank in range(world):
        got = measured(world)[rank][index]
        numel = sum(u["numel"] for u in got["units"])
        optim = numel // world if place.optim is Placement.SHARD else numel
        assert got["held"] == {"grads": 4 * optim, "partial": 0}
        width = 2 if precision == "bf16" else 4
        # Between steps: full weights where they rest replicated, and fp32 masters unless they are those very weights.
        # At stage 3 the root and the last unit are still gathered: the forward at the end of `measure` kept them.
        live = sum(u["numel"] for u in got["units"] if u["root"] or u["last"])
        if place.params is Placement.SHARD:
            expected = 4 * numel // world + width * live
        elif precision == "fp32":
            expected = 4 * numel
        else:
            expected = 2 * numel + 4 * optim
        assert got["weights"] == expected
        assert got["state"] == 8 * got["fragments"]  # two fp32 moments for real elements, none for padding
        total_state += got["state"]
        assert got["padding"] < 64 * (got["slots"] + world * got["groups"])
    copies = 1 if place.optim is Placement.SHARD else world
    assert total_state == 8 * copies * measured(world)[0][index]["params"]


@grid
@cases
def test_bytes_sent_per_step(world: int, index: int, case: tuple[int, str, int]) -> None:
    stage, precision, accumulation = case
    place = ZERO_STAGES[stage]
    for rank in range(world):
        got = measured(world)[rank][index]
        width = 2 if precision == "bf16" else 4
        share = {u: got["units"][u]["numel"] // world * (world - 1) for u in range(len(got["units"]))}
        everything = sum(share.values())
        if place.params is Placement.SHARD:
            # Forward and backward of every microbatch, but the root and the last block stay between the two. One more
            # forward was counted at the end.
            kept = sum(share[u] for u, unit in enumerate(got["units"]) if unit["root"] or unit["last"])
            gathers = accumulation * (2 * everything - kept) + everything
        else:
            gathers = everything if place.optim is Placement.SHARD else 0
        assert got["sent"]["all_gather"] == width * gathers
        windows = accumulation if place.grads is Placement.SHARD else 1
        scattered = windows * everything if place.optim is Placement.SHARD else 0
        assert got["sent"]["reduce_scatter"] == 4 * scattered
        assert got["all_reduced"] == (0 if place.optim is Placement.SHARD else 2 * 4 * everything)


@grid
@pytest.mark.parametrize(("index", "case"), list(enumerate(ENCODED)), ids=["-".join(map(str, c)) for c in ENCODED])
def test_encoded_messages_have_the_bytes_of_their_codec(world: int, index: int, case: tuple[int, str, str]) -> None:
    stage, wires, _ = case
    for rank in range(world):
        got = measured(world)[rank][len(CASES) + index]
        assert got["sent"] == got["planned"]
        assert got["resident"] == got["said"]
        whole = sum(got["parts"])
        means = whole if stage == 0 else 0
        feedback = WIRES[wires].get("error_feedback", False) and world > 1
        assert got["kept"] == (4 * (world * whole + means) if feedback else 0)
        if world == 1:
            continue
        bits = 4 if "int4" in wires else 8
        row = whole * bits // 8 + 4 * whole // BLOCK  # what a rank gets of another one's gradients
        assert got["sent"]["all_to_all"] == (world - 1) * row
        if stage == 0:
            assert got["sent"]["all_gather"] == (world - 1) * row
        elif stage < 3:
            assert got["sent"]["all_gather"] == (world - 1) * (whole + 4 * whole // BLOCK)
