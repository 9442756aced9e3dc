"""Offloaded training is bitwise training without offload: losses, norms, weights, masters and optimizer states."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.covering import FULL_GRID, PAIRS, chosen
from tests.harness import run_ranks
from tests.memory.offload.training import differences, make_engine, states, train

BF16 = {"bf16": {"enabled": True}}
ACCUMULATE = {"gradient_accumulation_steps": 3}


def offload(kind: str, folder: str) -> dict[str, Any]:
    """Sections of `zero_optimization`; `kind` is where the optimizer state rests, and after a + where the weights do."""
    optim, _, params = kind.partition("+")
    found: dict[str, Any] = {}
    if optim:
        found["offload_optimizer"] = {"device": optim.split(":")[0]}
        if "nvme" in optim:
            found["offload_optimizer"] |= {"nvme_path": folder, "pipeline_read": True, "pipeline_write": True}
        if ":" in optim:
            found["offload_optimizer"]["ratio"] = float(optim.split(":")[1])
    if params:
        found["offload_param"] = {"device": params}
        if params == "nvme":
            found["offload_param"] |= {"nvme_path": folder, "max_in_cpu": 0, "buffer_size": 5000}
    return found


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> (offload kind, arguments of `make_engine`)."""
    grid: dict[str, tuple[str, dict[str, Any]]] = {}
    for stage, kind in itertools.product((1, 2, 3), ("cpu", "nvme", "cpu:0.5", "nvme:0.5")):
        for name, options in {"fp32": {}, "bf16": {**BF16, **ACCUMULATE}}.items():
            grid[f"{stage}-{kind}-{name}"] = kind, {"stage": stage, **options}
        grid[f"{stage}-{kind}-frozen"] = kind, {"stage": stage, "frozen": True, **ACCUMULATE}
    for kind in ("+cpu", "+nvme", "cpu+cpu", "cpu+nvme", "nvme+cpu", "nvme+nvme", "cpu:0.5+cpu", "nvme:0.5+nvme"):
        for name, options in {"fp32": {}, "bf16": {**BF16, **ACCUMULATE}, "frozen": {"frozen": True, **BF16}}.items():
            grid[f"3-{kind}-{name}"] = kind, {"stage": 3, **options}
    for optimizer, kind in itertools.product(("adamw_loop", "sgd", "plain_sgd", "adagrad", "rmsprop"), ("cpu", "nvme")):
        grid[f"2-{kind}-{optimizer}"] = kind, {"stage": 2, "optimizer": optimizer, **BF16}
        grid[f"3-{kind}-{optimizer}"] = kind, {"stage": 3, "optimizer": optimizer}
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 16, "hysteresis": 1}}
    grid["3-cpu-fp16"] = "cpu", {"stage": 3, **fp16}
    grid["3-nvme+nvme-fp16"] = "nvme+nvme", {"stage": 3, **fp16}
    grid["2-cpu-accumulate_bf16"] = (
        "cpu",
        {"stage": 2, **BF16, **ACCUMULATE, "data_types": {"grad_accum_dtype": "bf16"}},
    )
    return grid


CASES = cases()


def settings(case: tuple[int, str]) -> dict[str, Any]:
    """What tells a case apart: ranks, where states rest, where weights do, and what else there is."""
    world, name = case
    stage, kind, more = name.split("-")
    optim, _, params = kind.partition("+")
    return {"world": world, "stage": stage, "optim": optim, "params": params, "more": more}


SHORT = 2
"""Steps before and after weights are changed by hand."""
CHOSEN = chosen([(world, name) for world in (1, 2) for name in CASES], settings, PAIRS)


def compare_all(rank: int, world: int, folder: str) -> dict[str, Any]:
    """By case: what differs from the run without offload. Runs without offload are made once for equal arguments."""
    from hf_dist.optim import step_batch

    step_batch._HOST_NUMEL = 3000  # several batches, as larger models have
    plain: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for name in (name for ranks, name in CHOSEN if ranks == world):
        kind, arguments = CASES[name]
        key = repr(sorted(arguments.items()))
        if key not in plain:
            engine = make_engine({}, **arguments)
            plain[key] = train(engine), states(engine), engine.skipped_steps
        engine = make_engine(offload(kind, folder), **arguments)
        record, held = train(engine), states(engine)
        expected = plain[key]
        found[name] = (
            repr(record) == repr(expected[0]),
            differences(held, expected[1]),
            engine.skipped_steps == expected[2],
        )
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`found(world)`: what differed, by rank and case."""

    @functools.cache
    def run(world: int) -> list[dict[str, Any]]:
        return run_ranks(compare_all, world, (str(tmp_path_factory.mktemp("swap")),), timeout=400)

    return run


@pytest.mark.parametrize(("world", "case"), CHOSEN)
def test_offloaded_training_is_bitwise_training_without_offload(world: int, case: str, found: Any) -> None:
    for rank, of_rank in enumerate(found(world)):
        assert of_rank[case] == (True, [], True), f"rank {rank}"


def compare_more(rank: int, world: int, folder: str) -> dict[str, tuple[bool, list[str]]]:
    """By offload kind, two shard groups of two ranks: what differs, with elements clipped and weights changed by hand"""
    import hf_dist

    found = {}
    for kind in ("cpu", "nvme", "cpu+cpu", "nvme+nvme") if FULL_GRID else ("nvme+nvme",):
        results = []
        for sections in ({}, offload(kind, folder)):
            engine = make_engine(sections, stage=3, shards=2, **BF16, **ACCUMULATE)
            record = train(engine, 0, SHORT, clip_value=1e-3)
            head = engine.model.head.weight
            with hf_dist.gathered(engine.model, modifier_rank=1):
                wanted = 2 * head.detach()
                if rank == 1:
                    head.data.mul_(2)
            with hf_dist.gathered(head):
                assert torch.equal(head, wanted), "a rank did not take the change"
            results.append((repr((record, train(engine, 0, SHORT))), states(engine)))
        found[kind] = results[0][0] == results[1][0], differences(results[0][1], results[1][1])
    return found


def test_hsdp_clipped_values_and_weights_changed_by_one_rank(tmp_path: Path) -> None:
    for of_rank in run_ranks(compare_more, 4, (str(tmp_path),), timeout=300):
        assert of_rank == dict.fromkeys(of_rank, (True, []))
