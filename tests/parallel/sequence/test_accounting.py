"""Bytes sent by the ranks that share a sequence, and what they keep for backward: equal to the formulas."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hf_dist.planning.longest import longest_rows
from hf_dist.planning.memory_plan import Limits
from tests.harness import run_ranks
from tests.parallel.sequence.families import make_batch, make_model

ROWS, LENGTH, LAYERS, HEADS, KEYS, SIZE = 2, 48, 2, 4, 2, 8
BYTES = 4
EXCHANGES = ("ulysses", "gather", "ring")
HALF = 2
WORLD = 2


def sent(rank: int, world: int) -> dict[str, dict[str, int]]:
    """Bytes by operation along `cp`, of one forward and backward; with recomputed blocks for Ulysses, too."""
    import hf_dist
    from hf_dist.dist import comm_counter

    found: dict[str, dict[str, int]] = {}
    for exchange in (*EXCHANGES, "ring in bf16", "recomputed", "convolution"):
        model = make_model("lfm2" if exchange == "convolution" else "llama")
        if exchange == "recomputed":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        kind = exchange.split()[0] if exchange.split()[0] in EXCHANGES else "ulysses"
        ours = {"sequence_parallel": kind, "stall_report_seconds": 0}
        config = {"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": world, "hf_dist": ours}
        config["bf16"] = {"enabled": exchange.endswith("bf16")}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = hf_dist.initialize(model, config=config, optimizer=optimizer)
        engine.train()
        batch = make_batch("llama", "plain", 0)
        for _ in range(9):  # later forwards do not compare their rows any more
            with comm_counter.record() as log:
                engine.backward(engine(**batch, use_cache=False).loss)
                engine.step()
        own: dict[str, int] = {}
        for entry in log.entries:
            if entry.axis == "cp":
                own[entry.op] = own.get(entry.op, 0) + entry.nbytes
        found[exchange] = own
    return found


@functools.cache
def results() -> list[dict[str, dict[str, int]]]:
    return run_ranks(sent, WORLD)


def positions_nbytes(heads: int, size: int = BYTES) -> int:
    """Of one tensor with so many heads of a rank's own positions, in all layers."""
    return LAYERS * ROWS * (LENGTH // WORLD) * heads * SIZE * size


@pytest.mark.parametrize(
    ("exchange", "expected"),
    [
        # Queries, keys, values there, the output back; the same in backward.
        ("ulysses", {"all_to_all": 2 * (WORLD - 1) * positions_nbytes(2 * HEADS + 2 * KEYS) // WORLD}),
        # A block that is run again exchanges again.
        ("recomputed", {"all_to_all": 3 * (WORLD - 1) * positions_nbytes(2 * HEADS + 2 * KEYS) // WORLD}),
        # A layer of attention, and one whose three projections go to the ranks of their channels and come back as one.
        (
            "convolution",
            {
                "all_to_all": (WORLD - 1)
                * (positions_nbytes(2 * HEADS + 2 * KEYS) + positions_nbytes(4 * HEADS))
                // WORLD
            },
        ),
        (
            "gather",
            {
                "all_gather": (WORLD - 1) * positions_nbytes(2 * KEYS),
                "reduce_scatter": (WORLD - 1) * positions_nbytes(2 * KEYS),
            },
        ),
        # Keys and values round about, twice; in backward their gradients in fp32, and home.
        ("ring", {"shift": (2 * (WORLD - 1) + WORLD) * positions_nbytes(2 * KEYS)}),
        # In half precision, too, gradients travel in fp32: every rank adds to them.
        (
            "ring in bf16",
            {"shift": 2 * (WORLD - 1) * positions_nbytes(2 * KEYS, HALF) + WORLD * positions_nbytes(2 * KEYS)},
        ),
    ],
)
def test_bytes_along_the_axis_equal_the_formula(exchange: str, expected: dict[str, int]) -> None:
    for found in results():
        loss = found[exchange].pop("all_reduce")
        assert loss <= 64  # the loss itself
        assert found[exchange] == expected
        found[exchange]["all_reduce"] = loss


@pytest.mark.parametrize(("tiles", "kilobytes"), [(1, 545), (16, 439)])
def test_a_long_row_keeps_what_the_table_says_per_local_token(tiles: int, kilobytes: int) -> None:
    """Llama-3 8B in bf16 without elements, every block recomputed, 16k tokens on each of 8 ranks, without head."""
    from transformers import LlamaConfig, LlamaModel

    from hf_dist.config import load_config
    from hf_dist.planning.recorder import measure_activations, text_batch

    shape: dict[str, Any] = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)
    with torch.device("meta"):
        model = LlamaModel(LlamaConfig(**shape, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256))
    config = load_config(
        {"bf16": {"enabled": True}, "activation_checkpointing": {"every_n_layers": 1, "mlp_tiles": tiles}}
    )
    tokens = 16384
    kept = measure_activations(model, config, text_batch(model, 1, tokens)).kept(config)
    assert (kept.device + kept.recomputed + kept.passing) / tokens / 1000 == pytest.approx(kilobytes, rel=0.01)


def test_the_longest_rows_fit_and_longer_ones_do_not() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from hf_dist.config import load_config, resolve_without_trainer
    from hf_dist.planning.planner import Planner, Workload

    ranks = 4
    shape: dict[str, Any] = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, vocab_size=1000)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=8))
    read = load_config(
        {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
            "sequence_parallel_size": ranks,
            "activation_checkpointing": {"every_n_layers": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        }
    )
    config = resolve_without_trainer(read, data_ranks=1, hidden_size=512)
    limits = Limits(device=2 * 10**9)

    def plan_at(tokens: int) -> Any:
        return Planner(model, ranks, Workload(1, tokens)).plan(config)

    found = longest_rows(plan_at, limits, ranks)
    assert found and found % ranks == 0
    assert not plan_at(found).over(limits)
    assert plan_at(found * 21 // 20).over(limits)
    assert longest_rows(plan_at, Limits(), ranks) is None
    assert longest_rows(plan_at, Limits(device=10**6), ranks) == 0


@settings(deadline=None)
@given(
    floor=st.integers(0, 10**9),
    each=st.integers(1, 10**5),
    limit=st.integers(1, 10**10),
    ranks=st.sampled_from([1, 2, 6]),
)
def test_the_longest_rows_are_bracketed_where_the_line_misses(floor: int, each: int, limit: int, ranks: int) -> None:
    """A peak that short rows do not raise: between the lengths that were planned the line is not the peak's."""
    assume(limit < each * 2**28)  # else rows of any length fit
    planned = []

    def plan_at(tokens: int) -> Any:
        planned.append(tokens)
        peak = max(floor, each * tokens)
        return SimpleNamespace(device_peak=peak, host=0, problem=None, over=lambda limits: peak > limits.device)

    found = longest_rows(plan_at, Limits(device=limit), ranks)
    assert found is not None and found % ranks == 0
    assert found == 0 or max(floor, each * found) <= limit
    longer = found + max(ranks, found // 60 // ranks * ranks) if found else ranks
    assert max(floor, each * longer) > limit
    assert len(planned) < 40
