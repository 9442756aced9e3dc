"""Gradient penalties: the gradient of a gradient is plain torch's, or the backward that would lose it raises by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import hf_dist
from hf_dist.errors import ModelError
from hf_dist.memory.loss import tiles
from hf_dist.sharding.full_params import full_gradient
from tests.harness import run_ranks
from tests.parity.families import make_model
from tests.window.nets import config

LENGTH, ROWS = 6, 4


def penalty(model: nn.Module, rows: slice = slice(None)) -> torch.Tensor:
    """The squared gradient of the model's own loss by its inputs; gradients of it are second derivatives."""
    width, vocabulary = model.config.hidden_size, model.config.vocab_size  # type: ignore[union-attr]
    g = torch.Generator().manual_seed(7)
    inputs = (0.1 * torch.randn(ROWS, LENGTH, width, generator=g))[rows].requires_grad_()
    labels = torch.randint(3, vocabulary, (ROWS, LENGTH), generator=g)[rows]
    loss = model(inputs_embeds=inputs, labels=labels).loss
    (found,) = torch.autograd.grad(loss, inputs, create_graph=True)
    return found.square().sum((1, 2)).mean()


def plain() -> nn.Module:
    # The memory-saving kernels of attention have no second derivative.
    model = make_model("llama")
    model.set_attn_implementation("eager")  # type: ignore[operator]
    return model


@functools.cache
def wanted() -> dict[str, torch.Tensor]:
    """Of plain torch."""
    model = plain()
    penalty(model).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def prepared(stage: int, **more: Any) -> Any:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hf_dist.initialize(model, config=config(stage, **more), optimizer=optimizer)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_gradient_of_a_penalty_is_that_of_torch(stage: int) -> None:
    engine = prepared(stage)
    penalty(engine.model).backward()
    for name, p in engine.model.named_parameters():
        if name in wanted():
            found = full_gradient(p)
            assert found is not None, name
            torch.testing.assert_close(found, wanted()[name], rtol=1e-4, atol=1e-6)


REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "freed weights": (3, {}, "stage 3"),
    "tiles of the loss": (1, {"hf_dist": {"tiled_loss": True}}, "tiled_loss"),
    "tiles of an MLP": (1, {"activation_checkpointing": {"mlp_tiles": 2}}, "mlp_tiles"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_lose_a_second_derivative_raises_by_name(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, more, words = REFUSED[case]
    monkeypatch.setattr(tiles, "TILE_BYTES", 1)
    engine = prepared(stage, **more)
    with pytest.raises(ModelError, match=rf"create_graph=True.*{words}"):
        penalty(engine.model)
    engine.backward(
        engine(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss
    )
    engine.step()


def on_two_ranks(rank: int, world: int) -> str:
    """What is said of a layer that two ranks share."""
    engine = prepared(1, tensor_parallel={"autotp_size": 2})
    try:
        penalty(engine.model)
    except ModelError as error:
        return str(error)
    return ""


def test_a_split_layer_raises_on_every_rank() -> None:
    assert all("split layer" in said for said in run_ranks(on_two_ranks, 2))
