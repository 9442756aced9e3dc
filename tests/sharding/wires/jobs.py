"""What ranks do around a training with encoded messages: write weights, read them, save, resume."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.attempts import attempts
from tests.sharding.wires.reference import Case
from tests.sharding.wires.training import batches_of, config_of, model_of, on_rank, optimizer_of


def run_cases(rank: int, world: int, cases: list[Case]) -> list[Any]:
    """Every case on this rank."""
    return attempts(rank, world, (functools.partial(on_rank, rank, world, case) for case in cases))


def engine_of(case: Case, seed: int = 0, **more: Any) -> Any:
    """An engine; `seed`: other weights, so that a load that does nothing is seen."""
    import hf_dist

    model = model_of(case)
    if seed:
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(std=0.1)
    trained = [p for p in model.parameters() if p.requires_grad]
    return hf_dist.initialize(model, config={**config_of(case), **more}, optimizer=optimizer_of(trained))


def steps(engine: Any, case: Case, rank: int, first: int, count: int) -> list[float]:
    """Losses of some steps."""
    losses = []
    for step in range(first, first + count):
        for batch in batches_of(case, step)[rank]:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


def masters_of(engine: Any) -> dict[str, torch.Tensor]:
    """All weights at full precision."""
    from hf_dist.hf.state_dict import full_state_dict

    return {n: v.clone() for n, v in full_state_dict(engine.sharded).items()}


def write_some(rank: int, world: int, cases: list[Case]) -> list[Any]:
    """User code changes one element: the masters of the others keep their bits, and all read what arrives."""
    return attempts(rank, world, (functools.partial(_write, case, rank) for case in cases))


def _write(case: Case, rank: int) -> Any:
    import hf_dist

    engine = engine_of(case)
    name = "model.layers.1.mlp.up_proj.weight"
    steps(engine, case, rank, 0, 1)
    before = masters_of(engine)
    param = dict(engine.model.named_parameters())[name]
    with hf_dist.gathered(engine.model, modifier_rank=0), torch.no_grad():
        read = {n: p.detach().clone() for n, p in engine.model.named_parameters()}
        if rank == 0:
            param[1, 3] = 0.5
    after = masters_of(engine)
    with hf_dist.gathered(engine.model):
        again = param.detach().clone()
    return {"before": before, "read": read, "after": after, "again": again, "losses": steps(engine, case, rank, 1, 2)}


def save_and_resume(rank: int, world: int, cases: list[Case], folder: str) -> list[Any]:
    """Train on, and train on after a resume in the same layout and in another one."""
    return attempts(
        rank, world, (functools.partial(_resume, case, rank, f"{folder}/{i}") for i, case in enumerate(cases))
    )


def _resume(case: Case, rank: int, folder: str) -> Any:
    engine = engine_of(case)
    steps(engine, case, rank, 0, 2)
    engine.save_checkpoint(folder)
    there = Path(folder)
    kept = {n: {k: r.values.clone() for k, r in w.residuals.items()} for n, w in _messages(engine).items()}
    straight = (steps(engine, case, rank, 2, 2), masters_of(engine))
    same = engine_of(case, seed=5)
    same.load_checkpoint(folder)
    loaded = {n: {k: r.values.clone() for k, r in w.residuals.items()} for n, w in _messages(same).items()}
    resumed = (steps(same, case, rank, 2, 2), masters_of(same))
    other = replace(case, stage=1 if case.stage != 1 else 2)
    elsewhere = engine_of(other, seed=6)
    steps(elsewhere, other, rank, 7, 1)
    elsewhere.load_checkpoint(folder)
    reset = [len(w.residuals) for w in _messages(elsewhere).values()]
    weights = masters_of(elsewhere)
    steps(elsewhere, other, rank, 2, 1)
    return {
        "kept": kept,
        "loaded": loaded,
        "straight": straight,
        "resumed": resumed,
        "reset": reset,
        "weights": weights,
        "files": sorted(p.name for p in there.iterdir()),
    }


def _messages(engine: Any) -> dict[str, Any]:
    return {
        f"{g.layout.slots[0].name} {name}": wire
        for g in engine.sharded.trainable_groups
        for name, wire in g.messages.items()
    }


def scaled(rank: int, world: int, case: Case) -> Any:
    """fp16 under a scale that doubles at each step, and under a constant one: powers of two change no bit."""
    results = []
    for section in ({"loss_scale_window": 1, "initial_scale_power": 12, "hysteresis": 1}, {"loss_scale": 4096.0}):
        engine = engine_of(case, fp16={"enabled": True, **section})
        losses = steps(engine, case, rank, 0, 4)
        results.append((losses, masters_of(engine), engine.loss_scale))
    return results
