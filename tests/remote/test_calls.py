"""Functions run on every rank of a role, and their results live there until the last reference here is gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_dist.config import load_config
from hf_dist.errors import ConfigError, ModelError
from hf_dist.remote.values import decoded, encoded
from tests.harness import run_ranks
from tests.remote.call_jobs import HERE, ask

TP2 = {"tensor_parallel": {"autotp_size": 2}}


def with_scorer(ranks: int, layout: dict[str, Any]) -> dict[str, Any]:
    scorer = {"ranks": ranks, "functions": [HERE], "config": layout}
    return {"train_micro_batch_size_per_gpu": 1, "hf_dist": {"roles": {"trainer": {"ranks": "rest"}, "scorer": scorer}}}


@pytest.mark.parametrize(
    ("trainers", "layout", "served", "scorers"), [(1, {}, 2, {}), (3, {}, 2, {}), (2, TP2, 2, TP2)]
)
def test_values_come_back_and_dropped_objects_are_freed(
    trainers: int, layout: dict[str, Any], served: int, scorers: dict[str, Any]
) -> None:
    found = run_ranks(ask, trainers + served, ({**layout, **with_scorer(served, scorers)}, False))
    assert found[trainers:] == [None] * served
    for values in found[:trainers]:
        assert values["total"][1] == values["of rank 1"][1] == "so"
        torch.testing.assert_close(values["total"][0], torch.tensor([6.5, 9.5]))
        torch.testing.assert_close(values["of rank 1"][0], torch.tensor([7.5, 10.5]))
        assert (values["alive"], values["afterwards"]) == (1, 0)


def test_an_exception_in_a_function_is_raised_here() -> None:
    with pytest.raises(
        RuntimeError, match="KeyError: 'of the function'"
    ):  # the role's own end; the trainer's is in the job
        run_ranks(ask, 3, (with_scorer(2, {}), True))


PLAIN = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner)
)


@given(VALUES)
def test_values_are_what_they_were_on_the_other_side(value: Any) -> None:
    assert decoded(encoded(value, [], "it"), [], lambda number: None) == value


@pytest.mark.parametrize("value", [object(), {1: 2}, {1, 2}, b"x", [lambda: 1]])
def test_what_would_need_a_pickle_is_refused(value: Any) -> None:
    with pytest.raises(ModelError, match=r"it has a .*, and only tensors"):
        encoded(value, [], "it")


def test_a_role_needs_a_model_or_functions() -> None:
    with pytest.raises(ConfigError, match="neither model nor functions"):
        load_config({"hf_dist": {"roles": {"a": {"ranks": "rest"}, "b": {"ranks": 1}}}})
    with pytest.raises(ConfigError, match="which is no list of names"):
        load_config({"hf_dist": {"roles": {"a": {"ranks": "rest"}, "b": {"ranks": 1, "functions": "os"}}}})
