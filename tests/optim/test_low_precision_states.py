"""Optimizer states in bf16: the numbers of the formula, resuming bit for bit, rounding by chance, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dist.config import load_config
from hf_dist.errors import ConfigError
from hf_dist.memory.offload.resting import opened
from hf_dist.optim.low_precision_states import Rounding, rounding_of
from tests.covering import FULL_GRID, some_of
from tests.harness import run_ranks
from tests.parity.families import make_batches, make_model, summed_loss

STEPS = 4 if FULL_GRID else 2
LR, EPS = 1e-3, 1e-6


NARROW = ("bf16_optimizer_states", "bf16_master_weights_and_grads")
BOTH, MASTERS = dict.fromkeys(NARROW, True), {NARROW[1]: True}


def engine_of(
    stage: int, stochastic: bool = False, offload: bool = False, *, grads: str | None = None, **narrow: bool
) -> Any:
    import hf_dist

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "eps": EPS}},
        "bf16": {"enabled": True, **(narrow or {NARROW[0]: True})},
        "data_types": {"grad_accum_dtype": grads} if grads else {},
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


def round_masters(engine: Any) -> None:
    """Master weights that are in bf16 between steps, by hand."""
    for group in engine.sharded.trainable_groups:
        with opened(group.master, changed=True) as values:
            values.copy_(values.bfloat16())
        group.masters_changed()
        group.write_back()


def round_states(engine: Any) -> None:
    """Optimizer states that are in bf16 between steps, by hand."""
    for state in engine.optimizer.state.values():
        for key in state.keys() - {"step"}:
            state[key].copy_(state[key].bfloat16())


NARROW_STATES = {"3": (3, False, False), "offload": (2, False, True), "chance": (1, True, False)}
"""Stage, rounding by chance, and whether states are offloaded."""
NARROW_STATES = some_of(NARROW_STATES, "offload", "chance")  # stage 3 is below, with master weights


def on_ranks(rank: int, world: int, root: str) -> dict[str, tuple[bool, bool, bool]]:
    """Whether states rest in bf16; masters are those of fp32 states rounded after each step; a resume goes on alike."""
    found = {}
    batches = make_batches("llama", STEPS + 1)
    for name, (stage, stochastic, offload) in NARROW_STATES.items():
        engine, wide = (
            engine_of(stage, stochastic, offload),
            engine_of(stage, False, offload, bf16_optimizer_states=False),
        )
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
        chance = rank.pop("chance")
        assert rank == dict.fromkeys(rank, (True, True, True))
        assert chance == (True, False, True), "rounded otherwise, and the next step is the same before it is rounded"


NARROW_MASTERS = [
    ("0", 0, False, MASTERS),
    ("1", 1, False, BOTH),
    ("3", 3, False, BOTH),
    ("3 offload", 3, True, BOTH),
    ("2 offload", 2, True, MASTERS),
]
"""Name, stage, whether states are offloaded, what is narrow."""
if not FULL_GRID:  # each of these settings is in another, too; a checkpoint of either stage is resumed at the other
    NARROW_MASTERS = [case for case in NARROW_MASTERS if case[0] in ("0", "3 offload")]


def with_narrow_masters(rank: int, world: int, root: str) -> dict[str, Any]:
    """The same of master weights in bf16, with states in either dtype; bytes held; gathered whole, exported and saved."""
    import hf_dist

    found: dict[str, Any] = {}
    batches = make_batches("llama", STEPS + 1)
    for name, stage, offload, narrow in NARROW_MASTERS:
        engine = engine_of(stage, False, offload, **narrow)
        wide = engine_of(stage, False, offload, grads="bf16", bf16_optimizer_states=False)
        round_masters(wide)  # as they are loaded
        wide_grads = wide.sharded.trainable_groups[0].precision.grads
        for batch in batches[:STEPS]:
            for each in (engine, wide):
                step(each, batch)
            round_masters(wide)
            if narrow is BOTH:
                round_states(wide)
        with hf_dist.gathered(engine.model), hf_dist.gathered(wide.model):
            pairs = zip(engine.model.parameters(), wide.model.parameters(), strict=True)
            same = all(torch.equal(a, b) for a, b in pairs)
        expected = masters(wide)
        same &= all(torch.equal(expected[n], v.float()) for n, v in masters(engine).items())
        held = {g.source.dtype for g in engine.sharded.trainable_groups}
        states = {v.dtype for s in engine.optimizer.state.values() for k, v in s.items() if k != "step"}
        folder = Path(root) / name
        engine.save_checkpoint(folder)
        step(engine, batches[STEPS])
        other = engine_of(3 - stage, **narrow)
        other.load_checkpoint(folder)
        step(other, batches[STEPS])
        with hf_dist.gathered(engine.model), hf_dist.gathered(other.model):
            pairs = zip(engine.model.parameters(), other.model.parameters(), strict=True)
            alike = all(torch.equal(a, b) for a, b in pairs)
        fp32 = engine_of(1, bf16_optimizer_states=False)
        fp32.load_checkpoint(folder)
        found[name] = {
            "grads": (engine.sharded.trainable_groups[0].precision.grads, wide_grads),
            "same": same,
            "alike": alike,
            "held": held,
            "states": states,
            "resident": sum(engine.resident_nbytes().values()),
            "wide": sum(wide.resident_nbytes().values()),
            "to fp32": {v.dtype for v in masters(fp32).values()},
        }
    return found


def test_master_weights_rest_in_bf16_and_are_stepped_in_fp32(tmp_path: Path) -> None:
    for rank in run_ranks(with_narrow_masters, 2, (str(tmp_path),)):
        for name, found in rank.items():
            assert found["same"], f"{name}: not the formula's numbers"
            assert found["alike"], f"{name}: a checkpoint goes on otherwise at another stage"
            assert found["held"] == {torch.bfloat16} and found["to fp32"] == {torch.float32}
            assert found["states"] == {torch.float32 if name in ("0", "2 offload") else torch.bfloat16}
            assert found["resident"] < found["wide"] and found["grads"] == (torch.bfloat16, torch.bfloat16)


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
        ({"hf_dist": {"stochastic_rounding": True}}, "rounds states and weights in bf16 only"),
    ],
)
def test_states_in_bf16_need_bf16(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rounding_of(load_config({"train_batch_size": 1, **config}), 0)


HALF = {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"}}


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_that_rest_in_bf16_are_lent_in_fp32_group_by_group(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hf_dist
    from hf_dist.optim import attach

    def trained(at_once: bool) -> tuple[Any, list[int]]:
        if at_once:
            monkeypatch.setattr(attach, "MASTER_DTYPE", torch.bfloat16)
        config = {
            "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, **HALF,
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "fused": False}}, "gradient_clipping": 0.1,
        }  # fmt: skip
        engine = hf_dist.initialize(make_model("llama"), config=config)
        lent: list[int] = []

        def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            lent.append(sum(f.tensor.grad is not None for f in engine.fragments.fragments))

        engine.optimizer.register_step_pre_hook(count)
        for batch in make_batches("llama", 2):
            step(engine, batch)
        return engine, lent

    engine, lent = trained(False)
    groups = engine.sharded.trainable_groups
    assert {g.precision.reduced for g in groups} == {torch.bfloat16}
    assert max(lent) == max(len(g.params) for g in groups) < len(engine.fragments.fragments)
    assert len(lent) == 2 * len(groups)
    together, whole = trained(True)
    assert whole == [len(engine.fragments.fragments)] * 2
    found, expected = masters(engine), masters(together)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_that_compute_in_fp32_take_steps_that_bf16_could_not_hold() -> None:
    import hf_dist

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    torch.nn.init.ones_(model[1].bias)
    config = {
        "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True, **BOTH}, "zero_optimization": {"stage": 1},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
    }  # fmt: skip
    engine = hf_dist.initialize(model, config=config)
    engine.backward(engine(torch.randn(4, 8)).sum())
    engine.step()
    assert torch.equal(model[1].bias, torch.full((8,), 1 - 4e-4))
    assert {g.source.dtype for g in engine.sharded.groups} == {torch.float32, torch.bfloat16}
