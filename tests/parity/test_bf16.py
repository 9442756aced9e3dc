"""In bf16 all ZeRO stages give the same losses, and none drifts from torch FSDP2's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.parity.families import make_batches, make_model, summed_loss

STEPS = 20 if FULL_GRID else 17
LR = 3e-3


def _batch(step: int, rank: int, world: int) -> tuple[dict[str, torch.Tensor], int]:
    """This rank's rows of a step, and the number of labelled items of the joined batch. Four batches, again and again."""
    joined = make_batches("llama", 4)[step % 4]
    rows = len(joined["labels"]) // world
    return {k: v[rank * rows :][:rows] for k, v in joined.items()}, int((joined["labels"][:, 1:] != -100).sum())


def train(rank: int, world: int, stage: int, reduce: str = "fp32") -> list[float]:
    """Losses of the joined batch under hf_dist."""
    import hf_dist
    from hf_dist.dist import collectives

    model = make_model("llama")
    config = {
        "train_micro_batch_size_per_gpu": 18, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage},
        "communication_data_type": reduce, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}},
    }  # fmt: skip
    engine = hf_dist.initialize(model, config=config)
    losses = []
    for step in range(STEPS):
        part, items = _batch(step, rank, world)
        total, _ = summed_loss(model, part)
        engine.backward(total * (world / items))
        engine.step()
        mean = (total.detach() / items).float()
        collectives.all_reduce(engine.mesh.dp, mean, op="sum").wait()
        losses.append(mean.item())
    return losses


def train_fsdp2(rank: int, world: int) -> list[float]:
    """The same under torch's fully_shard: bf16 compute, fp32 reduction and parameters."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = make_model("llama")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        part, items = _batch(step, rank, world)
        total, _ = summed_loss(model, part)
        (total * (world / items)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = (total.detach() / items).float()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


RUNS: dict[str, tuple[int, str]] = {f"z{s}": (s, "fp32") for s in ((0, 1, 2, 3) if FULL_GRID else (0, 3))} | {
    f"z{s}-bf16-wire": (s, "bf16") for s in ((1, 3) if FULL_GRID else (3,))
}


def run_all(rank: int, world: int) -> dict[str, list[float]]:
    """Every run in one spawn."""
    losses = {name: train(rank, world, *run) for name, run in RUNS.items()}
    return losses | {"fsdp2": train_fsdp2(rank, world)}


@functools.cache
def losses() -> dict[str, list[float]]:
    """Of rank 0; the losses are of the joined batch."""
    return run_ranks(run_all, 2)[0]


@pytest.mark.parametrize("name", [n for n in RUNS if n != "z0"])
def test_stages_agree_with_each_other(name: str) -> None:
    assert losses()[name] == pytest.approx(losses()["z0"], abs=1e-3 if "wire" not in name else 5e-3)


@pytest.mark.parametrize("name", list(RUNS))
def test_no_stage_drifts_from_fsdp2(name: str) -> None:
    assert losses()[name] == pytest.approx(losses()["fsdp2"], abs=2e-2)


def test_the_model_learns() -> None:
    first, last = losses()["z3"][0], losses()["z3"][-1]
    assert last < first - 0.5
