"""Bytes on the wire equal the formula; a file is read by slices; half precision; user code; what is refused, by name."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_dist.config import load_config, resolve_without_trainer
from hf_dist.errors import ModelError
from hf_dist.parallel.pipeline import plan_stages
from hf_dist.parallel.tensor_on_shards import plan_of
from tests.attempts import attempts_by_name
from tests.covering import FULL_GRID, FULL_GRID_ONLY
from tests.harness import run_ranks
from tests.parallel.tensor import past_blocks
from tests.parallel.tensor.on_ranks import (
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
from tests.parity.train import relative

BLOCKS, WORLD = 3, 2
Ranks = Callable[[Any], list[Any]]


REFUSED = "sequence_regions: true is not available for PastForCausalLM together with pipeline"
DTYPES = ["bf16", "fp16"] if FULL_GRID else ["bf16"]
STAGES = [0, 3] if FULL_GRID else [3]


def everything(rank: int, world: int, folder: str) -> dict[str, Any]:
    """What all tests of two ranks read, or what one process gives for them; one spawn. `folder`: of `save_pretrained`."""
    alike: list[Callable[..., Any]] = [
        *(functools.partial(precise, rank, world, dtype) for dtype in DTYPES),
        *(functools.partial(user_code, rank, world, stage) for stage in STAGES),
    ]
    jobs = dict(zip([*DTYPES, *STAGES], alike, strict=True))
    if world > 1:
        jobs |= {job.__name__: functools.partial(job, rank, world) for job in (wire, kept_inputs, run_again, refusals)}
        jobs["streamed"] = functools.partial(streamed, rank, world, folder)
    return attempts_by_name(rank, world, jobs)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """By name of a job: what each rank returned."""
    folder = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(folder)
    found = run_ranks(everything, WORLD, (str(folder),))

    def of(name: Any) -> list[Any]:
        for rank in found:
            assert not isinstance(rank[name], str), rank[name]
        return [rank[name] for rank in found]

    return of


@functools.cache
def alone() -> dict[Any, Any]:
    found: dict[Any, Any] = run_ranks(everything, 1, ("",))[0]
    return found


def test_bytes_and_calls_of_a_step_are_those_of_the_formula(ranks: Ranks) -> None:
    found, size = ranks("wire")[0], WORLD
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


def test_what_is_kept_of_a_blocks_input_is_one_part_of_the_sequence(ranks: Ranks) -> None:
    for rank in ranks("kept_inputs"):
        row = ROWS * HIDDEN * 4
        assert rank[False] == (BLOCKS * row * LENGTH, 0)
        assert rank[True] == (BLOCKS * row * -(-LENGTH // WORLD), 0)


@pytest.mark.parametrize("what", ["lengths", "lengths, own code"])
def test_forwards_of_two_lengths_run_again_in_one_backward(what: str, ranks: Ranks) -> None:
    """Their gradients are those of one after the other, by HF's flag and where the model's code calls checkpoint."""
    for rank in ranks("run_again"):
        at_once, in_turn = rank[what]
        assert relative(at_once, in_turn) < 1e-5


def test_a_forward_without_gradients_leaves_the_blocks_that_run_again_as_they_were(ranks: Ranks) -> None:
    for rank in ranks("run_again"):
        between, alone = rank["no gradients"]
        assert relative(between, alone) < 1e-5


@FULL_GRID_ONLY
def test_code_that_adds_past_blocks_keeps_whole_sequences_between_stages() -> None:
    for rank in run_ranks(past_blocks.losses, 4):
        assert rank["auto"] == pytest.approx(past_blocks.expected(), rel=1e-5)
        assert REFUSED in rank["True"]


def test_plans_of_code_that_adds_past_blocks_have_whole_sequences() -> None:
    """Stages know that what arrives is written in place, and then a sequence is kept in parts nowhere."""
    assert plan_stages(past_blocks.make(), past_blocks.window()[0], 2).plan.in_place
    sections = ({"train_batch_size": 1, "hf_dist": {"sequence_regions": regions}} for regions in ("auto", True))
    auto, always = (resolve_without_trainer(load_config(section)) for section in sections)
    assert plan_of(past_blocks.make(), auto, WORLD).sequence
    assert not plan_of(past_blocks.make(), auto, WORLD, in_place=True).sequence
    with pytest.raises(ModelError, match=REFUSED):
        plan_of(past_blocks.make(), always, WORLD, in_place=True)


def test_a_file_is_read_by_slices(ranks: Ranks) -> None:
    model = llama()
    expected = model(**batch()).loss.item()
    for rank in ranks("streamed"):
        assert rank["own"] * 1.9 < sum(p.numel() * 4 for p in model.parameters())
        assert rank["read"] == rank["own"]
        assert rank["loss"] == pytest.approx(expected, rel=1e-6)
        for name, p in model.named_parameters():
            assert torch.equal(rank["whole"][name], p), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_precision_learns_like_one_process_of_ours(dtype: str, ranks: Ranks) -> None:
    for losses in ranks(dtype):
        assert all(map(math.isfinite, losses))
        assert losses == pytest.approx(alone()[dtype], rel=0.02)
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("stage", STAGES)
def test_user_code_sees_slices_and_inside_gathered_the_whole(stage: int, ranks: Ranks) -> None:
    both, one = ranks(stage), alone()[stage]
    for found in both:
        assert (found["shape"], found["after"], found["inside"]) == ((32, 28), (32, 28), (32, 56))
        assert found["full_shape"] == (32, 56)
        assert relative(found["gradient"], one["gradient"]) < 1e-5
        assert relative(found["norm_gradient"], one["norm_gradient"]) < 1e-5
        assert found["together"] == pytest.approx(one["together"], rel=1e-6)
        assert found["written"][:2] == (0.5, 0.5)
        assert torch.equal(found["written"][2], both[0]["written"][2])
    assert both[1]["alone"] == pytest.approx(one["together"], rel=1e-6)


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
def test_what_cannot_be_is_refused_by_name(case: str, words: str, ranks: Ranks) -> None:
    found = ranks("refusals")[0][case]
    assert re.search(words, found), found
