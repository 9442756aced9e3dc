"""A call of a model whose sequences are split: every output, and every argument beside ids, are those of the model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import run_ranks
from tests.parallel.sequence.whole_calls import CASES, REFUSED, on_ranks


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(on_ranks, 2)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_the_model(name: str, ranks: Any) -> None:
    for found in ranks:
        assert not isinstance(found[name], str), found[name]
        largest = max(float(b.norm()) for key, (_, b) in found[name].items() if key != "loss")
        for key, (a, b) in found[name].items():
            assert float((a.double() - b.double()).norm()) <= 1e-5 * max(float(b.norm()), 0.01 * largest), key


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_another_model_on_parts_is_refused_by_name(name: str, ranks: Any) -> None:
    for found in ranks:
        assert not isinstance(found[name], str), found[name]
        assert found[name] and REFUSED[name][2] in found[name][0]
