"""Optimizer states in bf16: the numbers of the formula, resuming bit for bit, rounding by chance, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dist.config import load_config
from hf_dist.errors import ConfigError
from hf_dist.optim.rounded import Rounding, rounding_of
from tests.harness import run_ranks
from tests.parity.families import make_batches, make_model, summed_loss

STEPS = 4
LR, EPS = 1e-3, 1e-6


def engine_of(stage: int, stochastic: bool = False, offload: bool = False, narrow: bool = True) -> Any:
    import hf_dist

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "eps": EPS}},
        "bf16": {"enabled": True, "bf16_optimizer_states": narrow},
        "zero_optimization": {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {})},
        "hf_dist": {"stochastic_rounding": stochastic},
    }
    return hf_dist.initialize(make_model("llama"), config=config)


def step(engine: Any, batch: dict[str, torch.Tensor]) -> None:
    total, items = summed_loss(engine.model, {k: v[:2] for k, v in batch.items()})
    engine.backward(total / items)
    engine.step()


def masters(engine: Any) -> dict[str, torch.Tensor]:
    return {f.name: f.group.source[f.start : f.stop].clone() for f in engine.fragments.fragments}


def round_states(engine: Any) -> None:
    """What is in bf16 between steps, by hand."""
    for state in engine.optimizer.state.values():
        for key in state.keys() - {"step"}:
            state[key].copy_(state[key].bfloat16())


def on_ranks(rank: int, world: int, root: str) -> dict[str, tuple[bool, bool, bool]]:
    """Whether states rest in bf16; masters are those of fp32 states rounded after each step; a resume goes on alike."""
    found = {}
    batches = make_batches("llama", STEPS + 1)
    for name, stage, stochastic, offload in (
        ("3", 3, False, False),
        ("offload", 2, False, True),
        ("chance", 1, True, False),
    ):
        engine, wide = engine_of(stage, stochastic, offload), engine_of(stage, False, offload, narrow=False)
        for batch in batches[:STEPS]:
            step(engine, batch)
            step(wide, batch)
            round_states(wide)
        dtypes = {v.dtype for s in engine.optimizer.state.values() for k, v in s.items() if k != "step"}
        expected = masters(wide)
        same = all(torch.equal(expected[n], v) for n, v in masters(engine).items())
        engine.save_checkpoint(Path(root) / name)
        step(engine, batches[STEPS])
        other = engine_of(stage, stochastic, offload)
        other.load_checkpoint(Path(root) / name)
        step(other, batches[STEPS])
        going = masters(engine)
        alike = all(torch.equal(going[n], v) for n, v in masters(other).items())
        found[name] = (dtypes == {torch.bfloat16}, same, alike)
    return found


def test_states_rest_in_bf16_and_are_stepped_in_fp32(tmp_path: Path) -> None:
    for rank in run_ranks(on_ranks, 2, (str(tmp_path),)):
        assert rank["3"] == rank["offload"] == (True, True, True)
        assert rank["chance"] == (True, False, True), (
            "rounded otherwise, and the next step is the same before it is rounded"
        )


def test_rounding_by_chance_is_right_in_the_mean_and_leaves_what_bf16_can_hold() -> None:
    by_chance, nearest = Rounding(stochastic=True, seed=1), Rounding(stochastic=False)
    values = torch.full((100_000,), 1.0 + 2.0**-10)  # an eighth of the way from 1 to the next
    assert by_chance(values).float().mean().item() == pytest.approx(1.0 + 2.0**-10, abs=3e-5)
    assert torch.equal(nearest(values), torch.ones_like(values).bfloat16())
    held = torch.tensor([0.0, -0.0, 1.5, -3.0e38, float("inf"), float("nan"), 1e-40]).bfloat16()
    for rounding in (by_chance, nearest):
        assert torch.equal(rounding(held.float()).view(torch.int16), held.view(torch.int16))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states: true needs bf16"),
        (
            {"optimizer": {"type": "Adam", "params": {"fp32_optimizer_states": False}}, "fp16": {"enabled": True}},
            "optimizer.params.fp32_optimizer_states: false needs bf16",
        ),
        ({"hf_dist": {"stochastic_rounding": True}}, "rounds optimizer states in bf16 only"),
    ],
)
def test_states_in_bf16_need_bf16(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rounding_of(load_config({"train_batch_size": 1, **config}), 0)
