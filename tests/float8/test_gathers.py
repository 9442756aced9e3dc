"""Gathers that carry what products in float8 round to: passes compute the same, and who reads weights gets them whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dist.tensors.codecs import Float8Products
from tests import needs
from tests.float8.training import Case, batches_of, config_of, model_of
from tests.harness import run_ranks
from tests.sharding.wires.training import optimizer_of

needs.package("torchao", "it multiplies in float8")

CASE = Case(stage=3, accumulation=2, steps=2, checkpointing=True)
CASES = (CASE, replace(CASE, family="experts"), replace(CASE, recipe="mxfp8"))


def made(case: Case, **more: Any) -> Any:
    """An engine, and its trainable weights before it was built."""
    import hf_dist

    model = model_of(case)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = config_of(case)
    config["hf_dist"]["fp8"] |= more
    engine = hf_dist.initialize(model, config=config, optimizer=optimizer_of([*model.parameters()]))
    return engine, before


def trained(engine: Any, case: Case, rank: int) -> list[float]:
    """Losses of every microbatch."""
    losses = []
    for step in range(case.steps):
        for batch in batches_of(case, step)[rank]:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


def read_inside(rank: int, world: int) -> dict[str, Any]:
    """What user code reads and writes: before a forward, within one, and after a write."""
    import hf_dist

    engine, before = made(CASE)
    model, found = engine.model, {}
    name = "model.layers.1.mlp.up_proj.weight"
    weight = dict(model.named_parameters())[name]
    batch = batches_of(CASE, 0)[rank][0]

    def whole() -> bool:
        return all(torch.equal(p, before[n].to(p.dtype)) for n, p in model.named_parameters())

    with hf_dist.gathered(model):
        found["before"] = whole()
        inside = float(engine(**batch).loss)
    seen: list[torch.Tensor] = []

    def look(module: Any, args: Any, out: Any) -> None:
        seen.append(weight.detach().clone())
        with hf_dist.gathered(weight):
            seen.append(weight.detach().clone())

    hook = model.model.layers[1].mlp.register_forward_hook(look)
    loss = engine(**batch).loss
    hook.remove()
    found["same"] = inside == float(loss)
    rounded, exact = seen[:2]
    found["in a pass"] = not torch.equal(rounded, before[name].to(rounded.dtype))
    found["read in a pass"] = torch.equal(exact, before[name].to(exact.dtype))
    engine.backward(loss)
    engine.zero_grad()
    with hf_dist.gathered(weight, modifier_rank=0), torch.no_grad():
        weight[0] *= 2
    state = hf_dist.hf.state_dict.full_state_dict(engine.sharded)
    changed = before[name].to(torch.bfloat16)[0] * 2
    found["written"] = torch.equal(state[name][0].to(torch.bfloat16), changed)
    found["others keep their bits"] = torch.equal(state[name][1:], before[name][1:])
    return found


def kept_bytes(rank: int, case: Case) -> dict[str, Any]:
    """Losses with and without, what is kept in a window, and what is sent in it."""
    from hf_dist.dist import comm_counter

    found: dict[str, Any] = {}
    for gathers in ("float8", "whole"):
        engine, _ = made(case, gathers=gathers)
        found[gathers] = trained(engine, case, rank)
        at_rest = engine.resident_nbytes()["device"]
        with comm_counter.record() as log:
            batch = batches_of(case, 0)[rank][0]
            loss = engine(**batch).loss
        found[f"{gathers} cast"] = sum(u.casts.nbytes for u in engine.sharded.units if u.casts is not None)
        sizes = {"float8": 0, "kept": 0, "messages": 0}
        for group in engine.sharded.groups:
            wires, shard = group.at_rest.wires, group.layout.shard_numel
            one = Float8Products(64).nbytes(shard) if wires.of_products else shard * group.dtype.itemsize
            sizes["messages"] += one
            sizes["float8"] += group.layout.numel * wires.of_products
            sizes["kept"] += one * wires.of_products
        found[f"{gathers} sent"] = (sum(e.nbytes for e in log.entries if e.op == "all_gather"), sizes["messages"])
        full = [g.full.values for g in engine.sharded.groups if g.full.is_allocated]  # of the root and the last unit
        held = sizes["kept"] + sum(x.numel() * x.element_size() for x in full)
        found[f"{gathers} kept"] = (engine.resident_nbytes()["device"] - at_rest, held)
        weights = {n: p.numel() for n, p in engine.model.named_parameters()}
        kinds = {n: type(m).__name__ for n, m in engine.model.named_modules()}
        chosen = [
            n for n in weights if kinds[n.rpartition(".")[0]] in ("Float8Linear", "MXFP8Linear") or "experts." in n
        ]
        found[f"{gathers} share"] = (sizes["float8"], sum(weights[n] for n in chosen))
        engine.backward(loss)
        engine.step()
        engine.backward(engine(**batch).loss)
        engine.step()
        found[f"{gathers} after a step"] = engine.resident_nbytes()["device"] - at_rest
    return found


def run_both(rank: int, world: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Both on one start."""
    return read_inside(rank, world), [kept_bytes(rank, case) for case in CASES]


@pytest.fixture(scope="module")
def both() -> list[Any]:
    """Of two ranks."""
    return run_ranks(run_both, 2)


def test_who_reads_weights_gets_them_whole_and_writes_keep_other_bits(both: list[Any]) -> None:
    assert [rank[0] for rank in both] == [dict.fromkeys(both[0][0], True)] * 2
    assert len(both[0][0]) == 6


@pytest.mark.parametrize("case", range(len(CASES)))
def test_numbers_are_those_of_whole_gathers_and_bytes_are_those_of_the_formula(case: int, both: list[Any]) -> None:
    for rank in (found[case] for _, found in both):
        assert rank["float8"] == rank["whole"]  # to the last bit
        for gathers in ("float8", "whole"):
            sent, messages = rank[f"{gathers} sent"]
            assert sent == messages  # (n - 1) / n of n shards, on two ranks
            kept, encoded = rank[f"{gathers} kept"]
            assert kept == encoded
            assert rank[f"{gathers} after a step"] == 0
            assert rank[f"{gathers} cast"] == 0  # weights are there for one use only
        share, wanted = rank["float8 share"]
        assert share == wanted > 0 and rank["whole share"][0] == 0
        assert rank["float8 sent"][0] < 0.75 * rank["whole sent"][0]


@given(st.integers(0, 10**6), st.integers(-30, 30), st.sampled_from([torch.bfloat16, torch.float32]))
@settings(max_examples=25, deadline=None)
def test_what_arrives_is_cast_to_what_the_original_is_cast_to(seed: int, exponent: int, dtype: torch.dtype) -> None:
    """By torchao, in each recipe: rows, columns, whole tensors and MXFP8 have other scales than these blocks."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    g = torch.Generator().manual_seed(seed)
    weight = (torch.randn(96, 64, generator=g) * 2.0**exponent).to(dtype)
    # An element far below the largest is rounded twice there, to fewer digits than it arrives with.
    weight[weight.abs() < weight.abs().max() * 2.0**-13] = 0
    arrived = Float8Products(64).rounded(weight.view(-1)).view_as(weight)
    for granularity, axis in (
        (ScalingGranularity.TENSORWISE, None),
        *((ScalingGranularity.AXISWISE, a) for a in (0, -1)),
    ):
        one, other = (
            hp_tensor_to_float8_dynamic(
                x,
                torch.float8_e4m3fn,
                LinearMMConfig(),
                scaling_granularity=granularity,
                axiswise_dim=axis,
                round_scales_to_power_of_2=True,
            ).to_original_precision()
            for x in (weight, arrived)
        )
        assert torch.equal(one, other)
    for one, other in ((weight, arrived), (weight.t(), arrived.t())):
        assert torch.equal(_in_mxfp8(one), _in_mxfp8(other))


def _in_mxfp8(x: torch.Tensor) -> torch.Tensor:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode

    cast = MXTensor.to_mx(x.contiguous(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    return cast.dequantize(torch.float32)


def test_a_config_that_names_a_codec_keeps_it() -> None:
    from hf_dist.config import load_config
    from hf_dist.sharding.placement import placements_for

    def products(stage: int, **section: Any) -> object:
        file = {"zero_optimization": {"stage": stage}, "hf_dist": {"fp8": {"enabled": True, **section}}}
        return placements_for(load_config({"bf16": {"enabled": True}, **file})).wires.products

    assert products(3) == Float8Products(256)
    assert products(2) is products(0) is products(3, gathers="whole") is products(3, enabled=False) is None
    wires = placements_for(
        load_config(
            {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "hf_dist": {"fp8": {"enabled": True}}}
        )
    ).wires
    asked = replace(wires, weights=Float8Products(128))
    facts = {"trainable": True, "gathers": True, "reduces": True, "usual": True, "multiplied": True}
    assert asked.of_group(**facts).weights == Float8Products(128) and not asked.of_group(**facts).of_products
    assert wires.of_group(**facts).of_products and not wires.of_group(**{**facts, "multiplied": False}).weights
