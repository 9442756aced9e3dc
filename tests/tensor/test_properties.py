"""Bytes on the wire equal the formula; a file is read by slices; half precision; user code; what is refused, by name."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.parity.train import relative
from tests.tensor import past_blocks
from tests.tensor.on_ranks import (
    HIDDEN,
    LENGTH,
    ROWS,
    batch,
    kept_inputs,
    llama,
    precise,
    refusals,
    run_again,
    streamed,
    user_code,
    wire,
)

BLOCKS, WORLD = 3, 2


@functools.cache
def refused() -> dict[str, str]:
    found: dict[str, str] = run_ranks(refusals, WORLD)[0]
    return found


@pytest.mark.parametrize("size", [2])
def test_bytes_and_calls_of_a_step_are_those_of_the_formula(size: int) -> None:
    found = run_ranks(wire, size)[0]
    once = ROWS * LENGTH * HIDDEN * 4 * (size - 1) // size
    # Two crossings for a block in each direction, one for the embedding, one for the head's input; three numbers a row.
    loss = [4 * ROWS * LENGTH * (size - 1) * 2 // size, 4 * 2 * ROWS * LENGTH * (size - 1) * 2 // size]
    norms = 4 * 64 * (2 * BLOCKS + 1) * 2 * (size - 1) // size  # each in its own 64 elements; and the last one
    reduced, calls = found["plain"]["all_reduce"]
    assert calls - 2 == 4 * BLOCKS + 2
    assert reduced == (4 * BLOCKS + 2) * 2 * once + sum(loss)
    assert norms > 0 and found["plain"]["all_gather"] == (0, 0)
    padded = ROWS * (-(-LENGTH // size) * size) * HIDDEN * 4 * (size - 1) // size
    gathers, scatters = found["regions"]["all_gather"], found["regions"]["reduce_scatter"]
    # A gather and a scatter for a region in each direction; two gathers where the blocks begin and end.
    assert gathers == ((4 * BLOCKS + 2) * padded, 4 * BLOCKS + 2)
    assert scatters == (4 * BLOCKS * padded, 4 * BLOCKS)
    assert found["regions"]["all_reduce"] == (2 * 2 * once + sum(loss), 2 + 2)


def test_what_is_kept_of_a_blocks_input_is_one_part_of_the_sequence() -> None:
    for rank in run_ranks(kept_inputs, WORLD):
        row = ROWS * HIDDEN * 4
        assert rank[False] == (BLOCKS * row * LENGTH, 0)
        assert rank[True] == (BLOCKS * row * -(-LENGTH // WORLD), 0)


@functools.cache
def ran_again() -> list[dict[str, list[torch.Tensor]]]:
    return run_ranks(run_again, WORLD)


@pytest.mark.parametrize("what", ["lengths", "lengths, own code"])
def test_forwards_of_two_lengths_run_again_in_one_backward(what: str) -> None:
    """Their gradients are those of one after the other, by HF's flag and where the model's code calls checkpoint."""
    for rank in ran_again():
        at_once, in_turn = rank[what]
        assert relative(at_once, in_turn) < 1e-5


def test_a_forward_without_gradients_leaves_the_blocks_that_run_again_as_they_were() -> None:
    for rank in ran_again():
        between, alone = rank["no gradients"]
        assert relative(between, alone) < 1e-5


def test_code_that_adds_past_blocks_keeps_whole_sequences_between_stages() -> None:
    for rank in run_ranks(past_blocks.losses, 4):
        assert rank["auto"] == pytest.approx(past_blocks.expected(), rel=1e-5)
        assert "sequence_regions: true is not available for PastForCausalLM together with pipeline" in rank["True"]


def test_a_file_is_read_by_slices(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    expected = model(**batch()).loss.item()
    for rank in run_ranks(streamed, WORLD, (str(tmp_path),)):
        assert rank["own"] * 1.9 < sum(p.numel() * 4 for p in model.parameters())
        assert rank["read"] == rank["own"]
        assert rank["loss"] == pytest.approx(expected, rel=1e-6)
        for name, p in model.named_parameters():
            assert torch.equal(rank["whole"][name], p), name


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_learns_like_one_process_of_ours(dtype: str) -> None:
    alone = run_ranks(precise, 1, (dtype,))[0]
    for losses in run_ranks(precise, WORLD, (dtype,)):
        assert all(map(math.isfinite, losses))
        assert losses == pytest.approx(alone, rel=0.02)
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_user_code_sees_slices_and_inside_gathered_the_whole(stage: int) -> None:
    alone: Any = run_ranks(user_code, 1, (stage,))[0]
    ranks = run_ranks(user_code, WORLD, (stage,))
    for found in ranks:
        assert (found["shape"], found["after"], found["inside"]) == ((32, 28), (32, 28), (32, 56))
        assert found["full_shape"] == (32, 56)
        assert relative(found["gradient"], alone["gradient"]) < 1e-5
        assert relative(found["norm_gradient"], alone["norm_gradient"]) < 1e-5
        assert found["together"] == pytest.approx(alone["together"], rel=1e-6)
        assert found["written"][:2] == (0.5, 0.5)
        assert torch.equal(found["written"][2], ranks[0]["written"][2])
    assert ranks[1]["alone"] == pytest.approx(alone["together"], rel=1e-6)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("width", r"2 does not divide the 55 rows or columns of .*gate_proj\.weight\. Sizes that do: 1, 5, 11, 55"),
        ("heads", r"cannot share the 3 heads of .*q_proj"),
        ("dora", "DoRA, whose norms run along cut rows, is not available for model.layers.0.mlp.down_proj"),
        ("ia3", "ia3 adapters .* are not available on matrices that are cut; LoRA is"),
        ("copy", r"PEFT trains a copy of model\.embed_tokens \(modules_to_save\), which is cut"),
        ("compile", "compile.enabled: true is not available together with tensor_parallel.autotp_size above 1"),
        ("four_bits", r"not available for a base in 4 bits \(model\.layers\.0\.mlp\.down_proj\.weight\)"),
        ("stacked", r"adapters on model\.layers\.0\.mlp\.experts, whose weights are stacked, are not available"),
        (
            "narrow",
            r"2 leaves 12 of the 24 features of .*experts\.\w+ on a rank, of 2 bytes each, and torch's grouped_mm needs a "
            r"multiple of 16 bytes\. Sizes that do: 1, 3\. Or load the model with experts_implementation=\"eager\"",
        ),
        ("narrow, eager", "was accepted"),
        ("custom", "no tiny copy of Linear can be made and run, and without one no plan can be verified"),
    ],
)
def test_what_cannot_be_is_refused_by_name(case: str, words: str) -> None:
    import re

    assert re.search(words, refused()[case]), refused()[case]
