"""accelerate's DummyOptim and DummyScheduler: a loop whose optimizer and schedule are those of the JSON."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.harness import run_ranks
from tests.hf.lifetimes import rows, small_model, weights_of

STEPS, RATE, DECAY = 4, 0.05, 0.01
OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": [0.9, 0.99], "eps": 1e-3}}
SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
}
SECTIONS = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER}
QUIET = {"hf_dist": {"stall_report_seconds": 0, "check_load": False}}


def data() -> list[dict[str, torch.Tensor]]:
    return [{key: torch.tensor(value) for key, value in row.items()} for row in rows() * 2]


def groups(model: Any) -> list[dict[str, Any]]:
    """As examples have them: no decay of vectors."""
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]


def alone() -> tuple[dict[str, torch.Tensor], list[float]]:
    """Plain torch on joined batches: weights, and the learning rate after each step."""
    from hf_dist.optim.schedules import WarmupDecayLR

    model = small_model()
    optimizer = torch.optim.AdamW(groups(model), lr=RATE, betas=(0.9, 0.99), eps=1e-3)
    schedule = WarmupDecayLR(
        optimizer, total_num_steps=STEPS, warmup_min_lr=0.0, warmup_max_lr=RATE, warmup_num_steps=2
    )
    rates = []
    for batch in list(DataLoader(data(), batch_size=4))[:STEPS]:
        model(**batch).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    return {n: p.detach() for n, p in model.named_parameters()}, rates


def loop(rank: int, world: int, stage: int, own: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The loop of accelerate's examples; `own`: a schedule from a function of the script."""
    from hf_dist import (
        DistAccelerator,  # before accelerate's: without the deepspeed package it is hf_dist that offers them
    )

    from accelerate.utils import DummyOptim, DummyScheduler  # isort: skip

    from hf_dist.optim.schedules import WarmupDecayLR

    sections = {"optimizer": OPTIMIZER} if own else SECTIONS
    accelerator = DistAccelerator(dist_config={"zero_optimization": {"stage": stage}, **sections, **QUIET})
    model = small_model()
    optimizer = DummyOptim(groups(model), lr=RATE, weight_decay=DECAY)
    of_script = lambda o: WarmupDecayLR(  # noqa: E731
        o, total_num_steps=STEPS, warmup_min_lr=0.0, warmup_max_lr=RATE, warmup_num_steps=2
    )
    more = {"lr_scheduler_callable": of_script} if own else {}
    schedule = DummyScheduler(optimizer, total_num_steps=STEPS * world, warmup_num_steps=2, **more)
    loader = DataLoader(data(), batch_size=4 // world)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    rates = []
    for _, batch in zip(range(STEPS), loader, strict=False):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates.append(schedule.get_last_lr()[0])
    return weights_of(model), rates


def loops(rank: int, world: int) -> list[tuple[dict[str, torch.Tensor], list[float]]]:
    return [loop(rank, world, stage, own) for stage, own in ((1, False), (3, False), (3, True))]


def test_dummies_are_what_the_sections_say() -> None:
    weights, rates = alone()
    assert 0 < rates[-1] < max(rates)
    for found in run_ranks(loops, 2):
        for own_weights, own_rates in found:
            assert own_rates == pytest.approx(rates, rel=1e-12)
            for name, value in weights.items():
                assert (own_weights[name] - value).norm() <= 1e-5 * value.norm(), name


def refused(rank: int, world: int) -> list[str]:
    from hf_dist import (
        DistAccelerator,  # before accelerate's: without the deepspeed package it is hf_dist that offers them
    )

    from accelerate.utils import DummyOptim, DummyScheduler  # isort: skip

    from hf_dist.errors import ConfigError

    found = []
    model = small_model()
    accelerator = DistAccelerator(dist_config={"train_micro_batch_size_per_gpu": 2, **QUIET})
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for dummy in (DummyOptim(model.parameters()), DummyScheduler(optimizer)):
        try:
            accelerator.prepare(dummy)
        except ConfigError as error:
            found.append(str(error))
    return found


def test_dummies_without_a_section_are_refused_by_name() -> None:
    ((first, second),) = run_ranks(refused, 1)
    assert "optimizer: is missing, and DummyOptim stands for it. Add the section" in first
    assert "scheduler: is missing, and DummyScheduler stands for it. Add the section" in second
