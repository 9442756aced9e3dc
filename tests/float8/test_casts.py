"""Weights in eight bits that stay for a window: fewer casts, the same numbers, whatever happens to the weights between."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_dist.float8 import casts as casts_module
from hf_dist.planning.state_bytes import States
from tests import needs
from tests.covering import FULL_GRID
from tests.float8.training import Case, batches_of, config_of, model_of
from tests.harness import run_ranks
from tests.sharding.wires.training import optimizer_of

needs.package("torchao", "it multiplies in float8")

CASE = Case(world=1, accumulation=3, steps=2)
CASES = [
    replace(CASE, stage=0, recipe="tensorwise", bf16=False),
    replace(CASE, stage=2, checkpointing=True),
    replace(CASE, stage=1, recipe="rowwise_with_gw_hp", lora=True),
    replace(CASE, stage=1, family="gpt2"),
    *([replace(CASE, stage=2, compiled=True)] if FULL_GRID else []),  # `test_parity.py` has one
]
LABELS = ["-".join(f"{k} {v}" for k, v in vars(case).items() if v != getattr(CASE, k)) for case in CASES]


def engine_of(case: Case, casts: str) -> Any:
    """With an engine of one process."""
    import hf_dist

    model = model_of(case)
    config = config_of(case)
    config["hf_dist"]["fp8"]["casts"] = casts
    trained = [p for p in model.parameters() if p.requires_grad]
    return hf_dist.initialize(model, config=config, optimizer=optimizer_of(trained))


def held(engine: Any) -> tuple[int, int]:
    """Bytes of all casts, and of the plan."""
    config = engine.config
    casts = [unit.casts.nbytes for unit in engine.sharded.units if unit.casts is not None]
    return sum(casts), States.of_engine(engine.sharded, config).casts_nbytes


class Counted:
    """Counts casts of weights by torchao."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torchao.float8 import float8_linear, float8_scaling_utils
        from torchao.float8.float8_training_tensor import GemmInputRole

        self.count = 0
        stock = float8_scaling_utils.hp_tensor_to_float8_dynamic

        def counting(*args: Any, gemm_input_role: Any, **more: Any) -> Any:
            self.count += gemm_input_role is GemmInputRole.WEIGHT
            return stock(*args, gemm_input_role=gemm_input_role, **more)

        for module in (float8_linear, float8_scaling_utils):
            monkeypatch.setattr(module, "hp_tensor_to_float8_dynamic", counting)


@pytest.mark.parametrize("case", CASES, ids=LABELS)
def test_the_numbers_are_those_of_casts_for_each_use(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for casts in ("window", "use"):
        engine, counted, losses = engine_of(case, casts), Counted(monkeypatch), []
        layers = sum(type(m).__name__.startswith("Float8") for m in engine.model.modules())
        for step in range(case.steps):
            before = counted.count
            for batch in batches_of(case, step)[0]:
                loss = engine(**batch).loss
                engine.backward(loss)
                losses.append(loss.detach().clone())
                nbytes, planned = held(engine)
                kept = nbytes == planned and (casts == "window") == (nbytes > 0)
                # While the compiler traces a block it reads `p.data`, which could be written.
                assert kept or (case.compiled and step == 0)
                engine.step()
            assert held(engine)[0] == 0
            each = 1 if casts == "window" and case.recipe == "tensorwise" else 2
            again = 1 if casts == "window" else case.accumulation
            wanted = layers * (each + (case.checkpointing and casts == "use")) * again
            # Below adapters the first layers have no backward; a compiled block casts once while it is traced.
            assert counted.count - before == wanted or case.lora or case.compiled
        after = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
        found[casts] = (losses, after)
        monkeypatch.undo()
    (one, weights), (other, expected) = found["window"], found["use"]
    assert torch.equal(torch.stack(one), torch.stack(other))
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def write_data(engine: Any, weight: Any) -> None:
    """As old scripts do."""
    weight.data.mul_(1.5)


def write_new_data(engine: Any, weight: Any) -> None:
    """Another tensor in its place."""
    weight.data = weight.data * 1.5


def write_gathered(engine: Any, weight: Any) -> None:
    """The documented way."""
    import hf_dist

    with hf_dist.gathered(weight, modifier_rank=0), torch.no_grad():
        weight.mul_(1.5)


@pytest.mark.parametrize("write", [write_data, write_new_data, write_gathered])
@pytest.mark.parametrize("then", ["train", "evaluate", "copy"])
def test_a_write_between_two_microbatches_is_cast_as_well(write: Any, then: str) -> None:
    found = []
    for casts in ("window", "use"):
        engine = engine_of(replace(CASE, stage=1), casts)
        first, second, _ = batches_of(CASE, 0)[0]
        engine.backward(engine(**first).loss)
        copied = copy.deepcopy(engine.model) if then == "copy" else None
        weight = engine.model.model.layers[1].mlp.up_proj.weight
        write(engine, weight)
        if then == "train":
            loss = engine(**second).loss
            engine.backward(loss)
            found.append(loss.detach())
        elif copied is not None:
            copied.model.layers[1].mlp.up_proj.weight.data.mul_(1.5)
            found.append(copied(**second).loss.detach())
        else:
            with torch.no_grad():
                found.append(engine(**second).loss)
    assert torch.equal(*found)


def test_casts_that_were_made_before_one_failed_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory, for one; the weights may have changed when the layers run again."""
    engine = engine_of(replace(CASE, stage=1), "window")
    unit = engine.sharded.units[-1]
    assert unit.casts is not None
    made, stock = [0], casts_module.one_kernel

    def failing(*args: Any) -> Any:
        made[0] += 1
        if made[0] == 3:
            raise torch.OutOfMemoryError("for the test")
        return stock(*args)

    monkeypatch.setattr(casts_module, "one_kernel", failing)
    with pytest.raises(torch.OutOfMemoryError):
        unit.renew_casts()
    assert unit.casts.nbytes > 0
    unit.release_casts()
    assert unit.casts.nbytes == 0


def in_a_pipeline(rank: int, world: int) -> dict[str, Any]:
    """Losses, and the most bytes of casts."""
    found: dict[str, Any] = {}
    for casts in ("window", "use"):
        engine = engine_of(Case(world=2, pp=2, stage=3, accumulation=4, steps=2), casts)
        seen, stock = [], engine.sharded.units[-1].reshard

        def looking(engine: Any = engine, seen: Any = seen, stock: Any = stock) -> None:
            seen.append(held(engine)[0])
            stock()

        engine.sharded.units[-1].reshard = looking
        case = Case(world=2, pp=2, accumulation=4)
        found[casts] = [float(engine.train_batch(iter(batches_of(case, step)[0]))) for step in range(2)]
        found[f"{casts} held"] = (max(seen), held(engine))
    return found


def test_a_pipeline_keeps_them_for_its_window() -> None:
    for rank in run_ranks(in_a_pipeline, 2):
        assert rank["window"] == rank["use"]
        most, (left, planned) = rank["window held"]
        assert most == planned > left == 0
        assert rank["use held"][0] == 0
