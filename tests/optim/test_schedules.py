"""The schedules give DeepSpeed's learning rates, resume anywhere, and refuse what they cannot honour."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from hf_dist.errors import ConfigError
from hf_dist.optim.schedules import build_scheduler

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())["lr"]


def _id(entry: dict[str, Any]) -> str:
    return entry["type"] + "".join(f"-{value}" for value in entry["params"].values())


def _optimizer(*lrs: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in lrs])


def _advance(scheduler: LRScheduler, num_steps: int) -> list[float]:
    """The learning rates of the next `num_steps` optimizer steps."""
    used = []
    for _ in range(num_steps):
        used.append(scheduler.optimizer.param_groups[0]["lr"])
        assert scheduler.get_last_lr()[0] == used[-1]
        scheduler.optimizer.step()
        scheduler.step()
    return used


@pytest.mark.parametrize("entry", GOLDEN, ids=_id)
def test_learning_rates_equal_those_recorded_from_deepspeed(entry: dict[str, Any]) -> None:
    scheduler = build_scheduler(entry["type"], entry["params"], _optimizer(entry["base_lr"]))
    assert isinstance(scheduler, LRScheduler)
    assert _advance(scheduler, len(entry["lr"])) == pytest.approx(entry["lr"], rel=1e-12, abs=0)


@pytest.mark.parametrize("entry", GOLDEN, ids=_id)
def test_a_run_resumed_at_any_step_continues_the_sequence(entry: dict[str, Any], tmp_path: Path) -> None:
    for num_done in (0, 1, 3, 7):
        first = build_scheduler(entry["type"], entry["params"], _optimizer(entry["base_lr"]))
        _advance(first, num_done)
        torch.save(first.state_dict(), tmp_path / "scheduler.pt")
        second = build_scheduler(entry["type"], entry["params"], _optimizer(entry["base_lr"]))
        second.load_state_dict(torch.load(tmp_path / "scheduler.pt", weights_only=True))
        remaining = len(entry["lr"]) - num_done
        assert _advance(second, remaining) == pytest.approx(entry["lr"][num_done:], rel=1e-12, abs=0)


@pytest.mark.parametrize("entry", [entry for entry in GOLDEN if "betas" in entry], ids=_id)
@pytest.mark.parametrize("num_done", [0, 3, 5])
def test_one_cycle_moves_the_betas_as_recorded_from_deepspeed(entry: dict[str, Any], num_done: int) -> None:
    def build() -> LRScheduler:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=entry["base_lr"])
        return build_scheduler(entry["type"], entry["params"], optimizer)

    first = build()
    _advance(first, num_done)
    scheduler = build()
    scheduler.load_state_dict(first.state_dict())
    for betas in entry["betas"][num_done:]:
        assert scheduler.optimizer.param_groups[0]["betas"] == pytest.approx(betas, rel=1e-12)
        _advance(scheduler, 1)


def test_one_cycle_leaves_an_optimizer_without_betas_alone_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = build_scheduler("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}, _optimizer(1.0))
    assert "betas" not in scheduler.optimizer.param_groups[0] and "no betas" in caplog.text


def test_a_resumed_run_follows_the_schedule_it_is_resumed_with() -> None:
    first = build_scheduler("WarmupLR", {"warmup_num_steps": 2, "warmup_max_lr": 1.0}, _optimizer(1.0))
    _advance(first, 5)
    second = build_scheduler("WarmupLR", {"warmup_num_steps": 2, "warmup_max_lr": 0.5}, _optimizer(1.0))
    second.load_state_dict(first.state_dict())
    assert second.get_last_lr() == [0.5]


def test_load_state_dict_fills_a_learning_rate_that_is_a_tensor() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=torch.tensor(1.0), foreach=False)
    scheduler = build_scheduler("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear"}, optimizer)
    lr = optimizer.param_groups[0]["lr"]
    scheduler.load_state_dict({"last_epoch": 3, "_step_count": 4})
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.5


def test_last_batch_iteration_starts_the_sequence_at_its_index() -> None:
    entry = next(e for e in GOLDEN if e["params"].get("total_num_steps") == 12)
    params = {**entry["params"], "last_batch_iteration": 3}
    scheduler = build_scheduler(entry["type"], params, _optimizer(entry["base_lr"]))
    assert _advance(scheduler, 5) == pytest.approx(entry["lr"][4:9])


def test_lists_give_each_param_group_its_own_rates() -> None:
    params = {"warmup_min_lr": [0.0, 0.1], "warmup_max_lr": [1.0, 2.0], "warmup_num_steps": 2}
    scheduler = build_scheduler("WarmupLR", params, _optimizer(0.5, 0.5))
    assert scheduler.get_last_lr() == [0.0, 0.1]
    _advance(scheduler, 4)
    assert scheduler.get_last_lr() == [1.0, 2.0]


def test_missing_maximum_is_the_learning_rate_of_each_param_group() -> None:
    scheduler = build_scheduler("WarmupLR", {"warmup_num_steps": 2}, _optimizer(0.5, 0.25))
    _advance(scheduler, 4)
    assert scheduler.get_last_lr() == [0.5, 0.25]


@pytest.mark.parametrize(
    ("type", "params", "expected"),
    [
        ("WarmupLR", {"warmup_max_lr": 1.0}, [1.0, 1.0, 1.0]),
        ("WarmupDecayLR", {"warmup_max_lr": 1.0, "total_num_steps": 4}, [1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("WarmupCosineLR", {"total_num_steps": 2, "cos_min_ratio": 0.0}, [1.0, 0.5, 0.0, 0.0]),
    ],
)
def test_zero_warmup_steps_begin_at_the_maximum_and_say_so(
    type: str, params: dict[str, Any], expected: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        scheduler = build_scheduler(type, {**params, "warmup_num_steps": 0}, _optimizer(1.0))
    assert "DeepSpeed refuses" in caplog.text
    assert _advance(scheduler, len(expected)) == pytest.approx(expected)


def test_a_warmup_longer_than_training_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    build_scheduler("WarmupDecayLR", {"total_num_steps": 3, "warmup_num_steps": 9}, _optimizer(1.0))
    assert "less than warmup_num_steps" in caplog.text


def test_any_torch_scheduler_is_built_by_its_own_name() -> None:
    scheduler = build_scheduler("StepLR", {"step_size": 2, "gamma": 0.1}, _optimizer(1.0))
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    assert _advance(scheduler, 3) == pytest.approx([1.0, 1.0, 0.1])


@pytest.mark.parametrize(
    ("type", "params", "path", "words"),
    [
        ("OneCycle", {"cycle_min_lr": 0.1}, "scheduler.params.cycle_max_lr", "is missing"),
        (
            "OneCycle",
            {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_steps": 3},
            "scheduler.params.cycle_steps",
            "not a par",
        ),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "scheduler.params.lr_range_test_step_size", "at least 1"),
        ("WarmupDecayRL", {}, "scheduler.type", 'Did you mean "WarmupDecayLR"'),
        ("cosineanealinglr", {}, "scheduler.type", 'Did you mean "CosineAnnealingLR"'),
        ("_LRScheduler", {}, "scheduler.type", "is not a known scheduler"),
        ("LambdaLR", {}, "scheduler.type", "needs Python objects"),
        ("ReduceLROnPlateau", {}, "scheduler.type", "needs a metric"),
        ("WarmupLR", {"warmup_steps": 3}, "scheduler.params.warmup_steps", "is not a parameter of WarmupLR"),
        ("WarmupLR", {"warmup_num_steps": -1}, "scheduler.params.warmup_num_steps", "whole number of at least 0"),
        ("WarmupLR", {"warmup_num_steps": 1.5}, "scheduler.params.warmup_num_steps", "whole number of at least 0"),
        ("WarmupLR", {"warmup_num_steps": "auto"}, "scheduler.params.warmup_num_steps", "has not been filled in"),
        ("WarmupLR", {"warmup_max_lr": "high"}, "scheduler.params.warmup_max_lr", "not a number"),
        ("WarmupLR", {"warmup_min_lr": [0.0, 0.0]}, "scheduler.params.warmup_min_lr", "each of the 1 param groups"),
        ("WarmupLR", {"warmup_type": "cosine"}, "scheduler.params.warmup_type", "log, linear"),
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps", "is missing"),
        ("WarmupDecayLR", {"total_num_steps": True}, "scheduler.params.total_num_steps", "not a whole number"),
        ("StepLR", {"step": 1, "step_size": 1}, "scheduler.params.step", "gamma, last_epoch, step_size"),
        ("StepLR", {"step_size": 1, "gamma": "small"}, "scheduler.params.gamma", "not a number"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_path(type: str, params: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_scheduler(type, params, _optimizer(1.0))
    told = {problem.path: str(problem) for problem in caught.value.problems}  # beside others, where several are wrong
    assert words in told[path]
