"""The same training by ranks, with the engine; and what both start from."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.optim.onebit.reference import BETAS, DECAY, EPS, LR, Batch, Case, Reference
from tests.parallel.pipeline.zoo import VOCAB
from tests.parity.families import make_model

ROWS, LENGTH = 2, 10
TOLERANCE = 1e-6


class Heads(nn.Module):
    """Two heads, of which a batch uses those that it names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 24)
        self.a, self.b = nn.Linear(24, 3), nn.Linear(24, 3)

    def forward(self, x: torch.Tensor, heads: str) -> SimpleNamespace:
        hidden = torch.tanh(self.body(x.to(self.body.weight.dtype)))
        return SimpleNamespace(loss=sum(getattr(self, name)(hidden).square().mean() for name in heads))


HEADS = ("ab", "ab", "a", "ab", "b", "ab")
"""Heads that batches of each step use; the last rank uses `b` alone in the last step."""


def batches_of(case: Case, step: int) -> list[list[Batch]]:
    """`[rank][microbatch]`, rows of equal length without masked labels: all ranks count alike."""
    found: list[list[Batch]] = []
    for rank in range(case.world):
        g = torch.Generator().manual_seed(1000 * step + rank)
        if case.model == "heads":
            heads = "b" if step == len(HEADS) - 1 and rank == case.world - 1 else HEADS[step % len(HEADS)]
            found.append([{"x": torch.randn(4, 8, generator=g), "heads": heads} for _ in range(case.accumulation)])
            continue
        parts = [torch.randint(1, VOCAB, (ROWS, LENGTH), generator=g) for _ in range(case.accumulation)]
        found.append([{"input_ids": ids, "labels": ids.clone()} for ids in parts])
    return found


def model_of(case: Case) -> Any:
    """The model of a case, with equal weights everywhere."""
    if case.model == "heads":
        return Heads()
    model = make_model(case.model, tied=case.tied, lora=case.lora, checkpointing=case.checkpointing)
    if case.frozen:
        model.get_input_embeddings().requires_grad_(False)
    return model


def config_of(case: Case) -> dict[str, Any]:
    """The file of a case."""
    params: dict[str, Any] = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY}
    params["bias_correction"] = case.bias_correction
    params |= (
        {"var_freeze_step": case.freeze, "var_update_scaler": 2}
        if case.type == "ZeroOneAdam"
        else {"freeze_step": case.freeze}
    )
    half = {case.dtype: {"enabled": True, **({"loss_scale": case.scale} if case.dtype == "fp16" else {})}}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clip,
        "zero_optimization": {"stage": case.stage},
        "optimizer": {"type": case.type, "params": params},
        "hf_dist": {"wires": {"block": case.block}},
        **(half if case.dtype != "fp32" else {}),
    }


def alone(case: Case, norms: list[float]) -> dict[str, Any]:
    """One process. It clips by `norms`, those of the engine: a sign that the last bit of a factor turns is no small change."""
    one = Reference(model_of(case), case, norms)
    for step in range(case.steps):
        one.step(spoiled(case, step, batches_of(case, step)))
    return {"losses": one.losses, "norms": one.norms, "weights": one.masters}


def spoiled(case: Case, step: int, batches: list[list[Batch]]) -> list[list[Batch]]:
    """With what makes the last rank's gradient infinite, if the case says so."""
    if step in case.overflow:
        for batch in batches[-1]:
            batch["x"] = batch["x"] * math.inf
    return batches


def engine_of(case: Case) -> Any:
    """The engine of a case."""
    import hf_dist

    return hf_dist.initialize(model_of(case), config=config_of(case))


def steps_of(engine: Any, case: Case, rank: int, steps: range) -> tuple[list[float], list[float]]:
    """(losses, norms) of these steps."""
    losses, norms = [], []
    for step in steps:
        mine = []
        for batch in spoiled(case, step, batches_of(case, step))[rank]:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            mine.append(float(loss.detach()))
        losses.append(sum(mine) / len(mine))
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


def on_rank(rank: int, world: int, case: Case) -> dict[str, Any]:
    """Losses and weights of the engine; what the last step sent, by axis and operation."""
    from hf_dist.dist import comm_counter
    from hf_dist.hf.state_dict import full_state_dict

    engine = engine_of(case)
    losses, norms = steps_of(engine, case, rank, range(case.steps - 1))
    with comm_counter.record() as log:
        last = steps_of(engine, case, rank, range(case.steps - 1, case.steps))
    sent: dict[tuple[str, str], int] = {}
    for e in log.entries:
        sent[e.axis, e.op] = sent.get((e.axis, e.op), 0) + e.nbytes
    own = {n: p.detach().float().clone() for n, p in engine.model.named_parameters()}
    weights = full_state_dict(engine.sharded)
    groups = [(g.layout.num_shards, g.layout.shard_numel) for g in engine.sharded.trainable_groups]
    return {
        **{"losses": losses + last[0], "norms": norms + last[1], "weights": weights, "own": own},
        **{"sent": sent, "groups": groups, "steps": engine.optimizer.param_groups[0]["steps"]},
    }


def all_on_rank(rank: int, world: int, cases: list[Case]) -> list[dict[str, Any]]:
    """`on_rank` of each."""
    return [on_rank(rank, world, case) for case in cases]


def resumed(rank: int, world: int, case: Case, folder: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(weights of a run without a break, weights of one that was saved and loaded between its last two steps)."""
    engine = engine_of(case)
    steps_of(engine, case, rank, range(case.steps - 1))
    engine.save_checkpoint(folder)
    last = range(case.steps - 1, case.steps)
    steps_of(engine, case, rank, last)
    again = engine_of(case)
    again.load_checkpoint(folder)
    steps_of(again, case, rank, last)
    both = ({n: p.detach().clone() for n, p in each.model.named_parameters()} for each in (engine, again))
    return next(both), next(both)


def moved(
    rank: int, world: int, saved: Case, loaded: Case, folder: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """(whole momentum at a save, what another layout adds its gradients to after a load of it, its residuals)."""
    engine = engine_of(saved)
    steps_of(engine, saved, rank, range(saved.steps - 1))
    engine.save_checkpoint(folder)
    again = engine_of(loaded)
    steps_of(again, loaded, rank, range(loaded.freeze + 1))
    again.load_checkpoint(folder)
    rests = sum(len(group.messages["momentum"].residuals) for group in again.sharded.trainable_groups)
    return momentum_of(engine), momentum_of(again), rests


def momentum_of(engine: Any) -> dict[str, torch.Tensor]:
    """By parameter. Collective."""
    (member,) = engine.fragments.members
    found = {}
    for group in engine.sharded.trainable_groups:
        parts = member.sent._before(group)
        found |= {group.layout.slots[i].name: values.clone().view(-1) for i, values in parts.items()}
    return found


def looked_at(rank: int, case: Case) -> tuple[torch.Tensor, torch.Tensor, float, torch.Tensor]:
    """After a backward: own `p.grad`, `full_gradient`, norm, weights after the step."""
    import hf_dist

    engine = engine_of(case)
    steps_of(engine, case, rank, range(case.freeze))
    for batch in batches_of(case, 0)[rank]:
        engine.backward(engine(**batch).loss)
    p = next(engine.model.parameters())
    own, mean = p.grad.clone(), hf_dist.full_gradient(p)
    norm = engine.clip_grad_norm(1e9)
    engine.step()
    return own, mean, float(norm), engine.model.body.weight.detach().clone()


def refused() -> str:
    """What is said of an optimizer that the config does not name."""
    import hf_dist
    from hf_dist.errors import ModelError
    from hf_dist.optim.onebit_adam import OneBitAdam

    model = Heads()
    try:
        hf_dist.initialize(
            model, config={"train_micro_batch_size_per_gpu": 4}, optimizer=OneBitAdam(model.parameters())
        )
    except ModelError as error:
        return str(error)
    return ""


def on_two(rank: int, world: int, cases: list[Case], folder: str) -> dict[str, Any]:
    """All that two ranks do, in one spawn."""
    stages = [Case(stage=stage, model="heads") for stage in (0, 1)]
    return {
        "2": all_on_rank(rank, world, cases),
        "resumed": [resumed(rank, world, case, f"{folder}/{case.stage}") for case in stages],
        "moved": [moved(rank, world, *pair, f"{folder}/to{pair[1].stage}") for pair in (stages, stages[::-1])],
        "looked at": [looked_at(rank, case) for case in stages],
        "refused": refused(),
    }
