"""The optimizer's step inside of backward: the same bits as after it, and gradients that do not outlive their unit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dist.errors import ConfigError, ModelError
from hf_dist.memory.offload.resting import Tier
from hf_dist.memory.offload.storage import MASTER_NBYTES
from hf_dist.planning.optimizer_states import OptimizerStates
from hf_dist.planning.state_bytes import States
from tests.covering import FULL_GRID, some_of
from tests.harness import run_ranks
from tests.memory.offload.training import differences, make_engine, states, train

IN_BACKWARD = {"hf_dist": {"optimizer_in_backward": True}}
BF16 = {"bf16": {"enabled": True, "check_grad_overflow": False}}
ACCUMULATE = {"gradient_accumulation_steps": 3}
WORLDS, STEPS = (1, 2), 4 if FULL_GRID else 2
OFFLOADS: dict[str, tuple[str, ...]] = {"": (), "cpu": ("offload_optimizer",), "nvme": ("offload_optimizer",)}

AT = {"": (0, 1, 2, 3), "cpu": (1, 3), "nvme": (2, 3)}
"""Where states rest -> stages."""
KEPT = {1: ("2--fp32", "3--fp32"), 2: ("0--bf16", "2--fp32", "3--fp32", "3--bf16", "3-cpu-bf16", "2-nvme-bf16")}
"""By ranks: every stage that has passes of its own, every place of states, either dtype (and microbatches with it)."""


def cases(world: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Of so many ranks: name -> (where optimizer state rests, arguments of `make_engine`)."""
    grid: dict[str, tuple[str, dict[str, Any]]] = {}
    for stage, kind in itertools.product(range(4), OFFLOADS):
        if stage in AT[kind]:
            grid[f"{stage}-{kind}-fp32"] = kind, {"stage": stage}
            grid[f"{stage}-{kind}-bf16"] = kind, {"stage": stage, **BF16, **ACCUMULATE}
    grid["2--frozen"] = "", {"stage": 2, "frozen": True, **ACCUMULATE}
    grid["3--frozen"] = "", {"stage": 3, "frozen": True, **BF16}
    grid["3-cpu-frozen"] = "cpu", {"stage": 3, "frozen": True, **BF16}
    grid["3--overlapped"] = "", {"stage": 3, "offload": {"overlap_comm": True}}
    for optimizer in ("sgd", "adagrad", "adamw_loop"):
        grid[f"3--{optimizer}"] = "", {"stage": 3, "optimizer": optimizer}
    return some_of(grid, *KEPT[world])


def engine_of(kind: str, folder: str, arguments: dict[str, Any], **config: Any) -> Any:
    """An engine without clipping."""
    arguments = {"gradient_clipping": 0, **arguments, **config}
    zero = dict(arguments.pop("offload", {}))
    if kind:
        zero["offload_optimizer"] = {"device": kind, **({"nvme_path": folder} if kind == "nvme" else {})}
        if kind == "nvme":
            zero["offload_optimizer"] |= {"pipeline_read": True, "pipeline_write": True}
    return make_engine(zero, **arguments)


def held_at_once(engine: Any) -> list[int]:
    """Filled while the engine trains: elements of reduced gradients on this rank whenever one is complete."""
    seen: list[int] = []
    step = engine.gradient_final

    def look(group: Any) -> None:
        seen.append(sum(g.grad.numel() for g in engine.sharded.trainable_groups if g.grad is not None))
        step(group)

    engine.gradient_final = look
    return seen


def planned(engine: Any) -> int:
    """Elements of reduced gradients that the plan has on this rank at once."""
    plan = States.of_engine(engine.sharded, engine.config, OptimizerStates.of(engine.optimizer))
    return plan.nbytes.gradients[Tier.DEVICE] // MASTER_NBYTES


def compare_all(rank: int, world: int, folder: str) -> dict[str, Any]:
    """By case: what differs from stepping after backward; gradients held at once, as parts of the largest; the plan's."""
    found: dict[str, Any] = {}
    for name, (kind, arguments) in cases(world).items():
        plain = engine_of(kind, folder, arguments)
        expected = train(plain, count=STEPS), states(plain)
        engine = engine_of(kind, folder, arguments, **IN_BACKWARD)
        seen = held_at_once(engine)
        same = repr(train(engine, count=STEPS)) == repr(expected[0])
        largest = max(g.resting[1] - g.resting[0] for g in engine.sharded.trainable_groups)
        held = max(seen)
        found[name] = same, differences(states(engine), expected[1]), held / largest, (held, planned(engine))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """By number of ranks: what differed, by rank and case."""

    @functools.cache
    def on(world: int) -> list[dict[str, Any]]:
        return run_ranks(compare_all, world, (str(tmp_path_factory.mktemp("swap")),), timeout=400)

    return on


@pytest.mark.parametrize(("world", "case"), [(world, case) for world in WORLDS for case in cases(world)])
def test_the_same_bits_as_after_backward(world: int, case: str, found: Callable[[int], list[dict[str, Any]]]) -> None:
    for rank, of_rank in enumerate(found(world)):
        same, different, *_ = of_rank[case]
        assert same, f"rank {rank}: losses or norms differ"
        assert different == [], f"rank {rank}"


@pytest.mark.parametrize("case", ["2--fp32", "3--fp32"])
@pytest.mark.parametrize("world", WORLDS)
def test_one_reduced_gradient_at_a_time(world: int, case: str, found: Callable[[int], list[dict[str, Any]]]) -> None:
    assert all(of_rank[case][2] <= 1 for of_rank in found(world))


@pytest.mark.parametrize("world", WORLDS)
def test_the_plan_has_the_gradients_that_are_held_at_once(
    world: int, found: Callable[[int], list[dict[str, Any]]]
) -> None:
    """Where they are reduced in every microbatch, on the device."""
    for case, (kind, arguments) in cases(world).items():
        for of_rank in found(world) if arguments["stage"] >= 2 and not kind else ():
            held, plan = of_rank[case][3]
            assert held == plan, case


def through_stages(rank: int, world: int) -> tuple[bool, list[str]]:
    """Whether a pipeline's loss is the same, and which states are not."""
    import hf_dist
    from tests.parity.families import make_model

    results = []
    for extra in ({}, IN_BACKWARD):
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 3,
            "gradient_clipping": 0,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "pipeline": {"stages": 2},
            **extra,
        }
        engine = hf_dist.initialize(make_model("llama"), config=config, device="cpu")
        ids = torch.arange(64).reshape(8, 8) % 30
        losses = [float(engine.train_batch(iter([{"input_ids": ids, "labels": ids}] * 3))) for _ in range(2)]
        state = engine.fragments.members[0].state_dict()["state"]
        results.append((losses, {f"{k}.{n}": torch.as_tensor(v) for n, s in state.items() for k, v in s.items()}))
    return results[0][0] == results[1][0], differences(results[0][1], results[1][1])


def test_through_pipeline_stages() -> None:
    assert run_ranks(through_stages, 2) == [(True, [])] * 2


def test_a_second_backward_of_a_stepped_unit_is_refused(tmp_path: Path) -> None:
    engine = engine_of("", str(tmp_path), {"stage": 2}, **IN_BACKWARD)
    ids = torch.zeros(2, 6, dtype=torch.long)
    engine.backward(engine(ids).sum())
    with pytest.raises(ModelError, match=r"hf_dist\.optimizer_in_backward"):
        engine.backward(engine(ids).sum())


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"gradient_clipping": 0.5}, "gradient_clipping"),
        ({"fp16": {"enabled": True}}, "fp16.enabled"),
        ({"bf16": {"enabled": True, "check_grad_overflow": True}}, "bf16.check_grad_overflow"),
    ],
)
def test_what_needs_all_gradients_first_is_refused(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}(.|\n)*optimizer_in_backward"):
        engine_of("", "", {"stage": 2}, **{**IN_BACKWARD, **config})


def test_clipping_asked_for_later_is_refused() -> None:
    engine = engine_of("", "", {"stage": 2}, **IN_BACKWARD)
    engine.backward(engine(torch.zeros(2, 6, dtype=torch.long)).sum())
    with pytest.raises(ModelError, match="max_norm=1"):
        engine.clip_grad_norm(1.0)
    with pytest.raises(ModelError, match="max_value=2"):
        engine.clip_grad_value(2.0)
