"""Parameters that a flat buffer would change are refused by name, and those that only look like them are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hf_dist
from hf_dist.errors import ConfigError, ModelError
from hf_dist.sharding.fit import check_fit
from tests.harness import run_ranks
from tests.window.nets import Blocks, batch, config, loss_of, weights


def overlapping(model: Blocks) -> None:
    buffer = torch.randn(20)
    model.second, model.third = nn.Parameter(buffer[:12]), nn.Parameter(buffer[8:])


def complex_numbers(model: Blocks) -> None:
    model.second = nn.Parameter(torch.randn(3, dtype=torch.complex64))


def one_under_two_names(model: Blocks) -> None:
    model.second = model.first.weight


def side_by_side(model: Blocks) -> None:
    """As cuDNN lays out the weights of an LSTM."""
    buffer = torch.randn(20)
    model.second, model.third = nn.Parameter(buffer[:12]), nn.Parameter(buffer[12:])


def columns(model: Blocks) -> None:
    model.second = nn.Parameter(torch.randn(4, 6)[:, ::2])


def prepared(change: Callable[[Blocks], None]) -> nn.Module:
    model = Blocks()
    change(model)
    engine = hf_dist.initialize(model, config=config(1), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    return engine.model


def frozen_view(model: Blocks) -> None:
    """It would follow the steps of the other."""
    model.second, model.third = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.empty(4, 6), requires_grad=False)
    model.third.data = model.second.data


@pytest.mark.parametrize("change", [overlapping, frozen_view])
def test_parameters_that_cannot_be_kept_equal_are_refused_by_both_names(change: Callable[[Blocks], None]) -> None:
    with pytest.raises(ModelError, match=r"second and third are two parameters in the same memory"):
        prepared(change)


class Viewed(Blocks):
    """Three parameters on the same elements, each with a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Parameter(self.first.weight.t())
        self.third = nn.Parameter(torch.empty(8, 8))
        self.third.data = self.first.weight.data

    def forward(self, x: torch.Tensor, to_head: bool = True) -> torch.Tensor:
        x = self.first(x)
        return super().forward(x + 0.1 * torch.tanh(x @ self.second) + 0.1 * torch.sin(x @ self.third), to_head)


def stepped(optimizer: str, stage: int | None = None, own: slice = slice(None), rows: int = 4) -> torch.Tensor:
    """Weights after four steps on `own` of the rows of each batch; one step leaves a parameter out."""
    model = Viewed()
    made = {
        "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
        "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0),
    }[optimizer](model.parameters())
    if stage is not None:
        engine = hf_dist.initialize(model, config=config(stage), optimizer=made)
    for i in range(4):
        if i == 2:
            model.third.requires_grad_(False)
        loss_of(model, batch(i, rows)[own]).backward()
        model.third.requires_grad_(True)
        made.step()
        made.zero_grad()
    assert stage is None or engine.global_steps == 4
    return weights(model)


def stepped_on_ranks(rank: int, world: int) -> dict[Any, torch.Tensor]:
    own = slice(4 * rank, 4 * rank + 4)
    return {(o, z): stepped(o, z, own, 4 * world) for o in ("sgd", "adamw") for z in (1, 3)}


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_that_are_views_of_each_other_get_the_changes_of_all_as_in_torch(world: int) -> None:
    plain = {o: stepped(o, rows=4 * world) for o in ("sgd", "adamw")}
    alone = {(o, z): stepped(o, z) for o in plain for z in range(4)} if world == 1 else {}
    for found in [alone] if world == 1 else run_ranks(stepped_on_ranks, 2, ()):
        for (optimizer, _), value in found.items():
            torch.testing.assert_close(value, plain[optimizer], rtol=1e-5, atol=1e-6)


def test_a_step_in_backward_does_not_wait_for_views() -> None:
    with pytest.raises(
        ConfigError, match=r"optimizer_in_backward: true second and third and first.weight are parameters"
    ):
        model = Viewed()
        settings = config(1, hf_dist={"optimizer_in_backward": True})
        hf_dist.initialize(model, config=settings, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_complex_parameter_is_refused() -> None:
    with pytest.raises(ModelError, match=r"second is complex \(torch\.complex64\).*view_as_complex"):
        prepared(complex_numbers)


@pytest.mark.parametrize("change", [one_under_two_names, side_by_side, columns])
def test_others_keep_their_elements(change: Callable[[Blocks], None]) -> None:
    plain = Blocks()
    change(plain)
    expected = {name: p.detach().clone() for name, p in plain.named_parameters()}
    found = dict(prepared(change).named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].detach(), value, rtol=0, atol=0)


def test_an_embedding_that_forward_renormalises_is_refused_on_several_data_ranks() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0), nn.Linear(2, 2))
    check_fit(model)
    with pytest.raises(ModelError, match=r"0: max_norm=1.0 writes the rows"):
        check_fit(model, data_ranks=2)


def test_a_parameter_without_memory_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"2 parameters have no memory \(device 'meta'\), the first is weight"):
        check_fit(model)
