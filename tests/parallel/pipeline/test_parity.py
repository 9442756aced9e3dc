"""All stages in one process against the plain model: loss and every gradient, for every family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_dist.errors import ModelError
from hf_dist.parallel.pipeline import (
    forward_only,
    make_plan,
    make_schedule,
    partition,
    plan_stages,
    probe,
    verify,
)
from tests.covering import FULL_GRID, cells
from tests.parallel.pipeline.local import run_local, stage_models, summed_gradients
from tests.parallel.pipeline.zoo import CLASSIFIERS, CONFIGS, SEQ2SEQ, TIED_ALWAYS, make_microbatches, make_model

MICROBATCHES = 4
TOLERANCE = 1e-6


def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return model(**batch).loss / MICROBATCHES


def plain(
    model: nn.Module, batches: list[dict[str, Any]], loss_of: Callable[[Any, Any], torch.Tensor] = loss_of
) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = []
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(loss.item())
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return losses, gradients


def check(model: nn.Module, batches: list[Any], stages: int, schedule: str = "1f1b", virtual: int = 1) -> list[Any]:
    """Split, verify, run a step; returns the staged copies. Gradients relative to each parameter's largest one."""
    found = probe(model, batches[0])
    plan = make_plan(found, partition(found.costs(), stages * virtual).bounds)
    verify(model, plan, batches[0])
    expected_losses, expected = plain(model, batches)
    steps = make_schedule(schedule, stages, len(batches), virtual)
    staged = stage_models(model, plan, steps)
    losses = run_local(staged, steps, batches, loss_of)
    assert [x.item() for x in losses] == pytest.approx(expected_losses, rel=TOLERANCE)
    gradients = summed_gradients(staged)
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        got = gradients.get(name, torch.zeros_like(gradient))
        assert (got - gradient).abs().max().item() <= TOLERANCE * scale + 1e-12, name
    return staged


CAN_TIE = [f for f in CONFIGS if f not in (*CLASSIFIERS, *TIED_ALWAYS, *SEQ2SEQ, "ViT")]
GRID = [
    *((family, stages, False, False, "1f1b") for family in CONFIGS for stages in (2, 3, 4)),
    *((family, 2, True, False, "1f1b") for family in CAN_TIE),
    *((family, 2, False, True, "1f1b") for family in CONFIGS),
    *((family, 4 if family in SEQ2SEQ else 2, False, False, "zb_h1") for family in CONFIGS),
]


BY_DEFAULT = (
    ("Llama", 2, False, True, "1f1b"),
    ("Mixtral", 2, True, False, "1f1b"),
    ("GPT2", 3, False, False, "1f1b"),
    ("ViT", 2, False, False, "1f1b"),
    ("GptOss", 2, False, False, "1f1b"),
    ("Gemma3", 2, False, False, "zb_h1"),
    ("DebertaV2", 2, False, False, "zb_h1"),
    ("T5", 4, False, False, "zb_h1"),
)
"""Every number of stages, ties, recomputation, tables used often in a split backward; every kind of block, but for those of
Bloom and Bart, whose outputs are read below."""
FEW = GRID if FULL_GRID else [case for case in GRID if case in BY_DEFAULT]


@pytest.mark.parametrize(("family", "stages", "tied", "checkpointing", "schedule"), FEW)
def test_loss_and_gradients_equal_the_plain_model(
    family: str, stages: int, tied: bool, checkpointing: bool, schedule: str
) -> None:
    model = make_model(family, tied=tied, checkpointing=checkpointing)
    check(model, make_microbatches(family, MICROBATCHES), stages, schedule)


SCHEDULED = {
    "family": ("Llama", "Bert", "T5", "Mixtral"),
    "schedule": ("gpipe", "interleaved_1f1b", "zb_h1"),
    "checkpointing": (False, True),
}
SCHEDULES = [cell for cell in cells(SCHEDULED, 1) if FULL_GRID or cell["family"] != "T5"]  # it is above, with `zb_h1`


@pytest.mark.parametrize(("family", "schedule", "checkpointing"), [tuple(cell.values()) for cell in SCHEDULES])
def test_every_schedule(family: str, schedule: str, checkpointing: bool) -> None:
    virtual = 2 if schedule == "interleaved_1f1b" else 1
    model = make_model(family, checkpointing=checkpointing)
    check(model, make_microbatches(family, MICROBATCHES), 2, schedule, virtual)


OWN_LISTS = ("Bloom", "Falcon", "DebertaV2", *SEQ2SEQ)
"""Models that make the list of hidden states in code between their blocks, which a stage cannot know."""


@pytest.mark.parametrize("family", CONFIGS if FULL_GRID else ["GptOss", "Bert", "Bloom", "T5"])
def test_evaluation_gives_the_logits_and_what_transformers_collects(family: str) -> None:
    model = make_model(family).eval()
    more = {"output_hidden_states": family not in OWN_LISTS}
    batches = [{k: v for k, v in b.items() if k != "labels"} | more for b in make_microbatches(family, 3)]
    if family in SEQ2SEQ:
        batches = [b | {"decoder_input_ids": b["input_ids"][:, :5]} for b in batches]
    plan = make_plan(found := probe(model, batches[0]), partition(found.costs(), 2).bounds)
    schedule = forward_only(2, len(batches))
    results = run_local(stage_models(model, plan, schedule), schedule, batches, lambda m, b: m(**b))
    for output, batch in zip(results, batches, strict=True):
        with torch.no_grad():
            expected = model(**batch)
        assert output.keys() == expected.keys()
        torch.testing.assert_close(dict(output), dict(expected), rtol=TOLERANCE, atol=1e-7)
        if "encoder_last_hidden_state" in expected:
            assert torch.equal(output.encoder_last_hidden_state, expected.encoder_last_hidden_state)


@pytest.mark.parametrize("family", OWN_LISTS if FULL_GRID else ["Bloom", "Bart"])
def test_every_output_that_can_be_read_is_the_models(family: str) -> None:
    model = make_model(family).eval()
    batches = [{k: v for k, v in b.items() if k != "labels"} for b in make_microbatches(family, 2)]
    if family in SEQ2SEQ:
        batches = [b | {"decoder_input_ids": b["input_ids"][:, :5]} for b in batches]
    plan = make_plan(found := probe(model, batches[0]), partition(found.costs(), 2).bounds)
    schedule = forward_only(2, len(batches))

    def outputs(m: Any, b: dict[str, Any]) -> list[Any]:  # as the Trainer takes them, no dict of the model's
        return list(m(**b, output_hidden_states=True).items())

    results = run_local(stage_models(model, plan, schedule), schedule, batches, outputs)
    for read, batch in zip(results, batches, strict=True):
        with torch.no_grad():
            expected = dict(outputs(model, batch))
        assert [name for name, _ in read] == list(expected)
        refused = []
        for name, value in read:
            try:
                values = [value[i] + 0 for i in range(len(expected[name]))]
            except ModelError as error:
                assert "was computed by an earlier stage" in str(error)
                refused.append(name)
                continue
            for a, b in zip(values, expected[name], strict=True):
                torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=1e-7)
        assert refused and len(refused) < len(expected)


def test_autocast_rounds_as_in_the_plain_model() -> None:
    """Autocast keeps one cast of a leaf for all its uses; what a stage received must not count as one."""

    def function(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, batch)

    model, batches = make_model("Bert"), make_microbatches("Bert", MICROBATCHES)
    plan = plan_stages(model, batches[0], 2, run=function).plan
    schedule = make_schedule("1f1b", 2, MICROBATCHES)
    staged = stage_models(model, plan, schedule)
    run_local(staged, schedule, batches, function)
    for batch in batches:
        function(model, batch).backward()
    gradients = summed_gradients(staged)
    for name, param in model.named_parameters():
        if param.grad is not None:
            assert torch.equal(gradients[name], param.grad), name
