"""Parameters that a flat buffer would change are refused by name, and those that only look like them are trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hf_dist
from hf_dist.errors import ModelError
from hf_dist.sharding.fit import check_fit
from tests.window.nets import Blocks, config


def transposed(model: Blocks) -> None:
    model.second = nn.Parameter(model.first.weight.t())


def shared(model: Blocks) -> None:
    model.second = nn.Parameter(torch.empty(8, 8))
    model.second.data = model.first.weight.data


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


@pytest.mark.parametrize("change", [transposed, shared, overlapping])
def test_two_parameters_in_the_same_memory_are_refused_by_both_names(change: Callable[[Blocks], None]) -> None:
    with pytest.raises(
        ModelError, match=r"second.*(first\.weight|third).*same memory|first\.weight.*second.*same memory"
    ):
        prepared(change)


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
