"""What jobs say to each other is plain JSON: a call is checked before it counts, and an offer is what it was."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from hf_dist.dist.watchdog.location import _ACTIVITIES, WAITS_FOR_CALLS
from hf_dist.errors import ConfigError, RemoteError
from hf_dist.hf.model_class import architecture_of, told_config
from hf_dist.remote.offer import Offer
from hf_dist.remote.serving import Server
from hf_dist.remote.visits import Visits, _is_call
from tests.parity.families import make_model

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
CALL = {"call": "forward", "number": 1, "names": ["input_ids"], "dropped": [1], "options": {"use_cache": False}}


@given(st.dictionaries(st.sampled_from([*CALL, "more"]), VALUES), st.integers(0, 2))
def test_whatever_counts_as_a_call_can_be_answered(strange: dict[str, Any], count: int) -> None:
    said = {**CALL, **strange}
    if _is_call(said, count):
        assert isinstance(said["call"], str) and said["number"] + sum(said["dropped"]) is not None
        assert dict(zip(said["names"], range(count), strict=True)).keys() <= set(said["names"])
        assert dict(**said["options"]) == said["options"]
    assert _is_call(CALL, 1) and not _is_call(CALL, 2) and not _is_call({**CALL, "more": 1}, 1)


@given(st.integers(1, 9), st.lists(st.tuples(st.text(), st.integers(1, 65535))), st.lists(st.text()))
def test_an_offer_crosses_as_json(ranks: int, doors: list[tuple[str, int]], functions: list[str]) -> None:
    offer = Offer("teacher", ranks, tuple(functions), tuple(doors), "bf16", {"model_type": "llama"}, None)
    assert Offer.of(json.loads(json.dumps(offer.header())), "it") == offer


@pytest.mark.parametrize(
    "header", [{}, {"offer": 3}, {"offer": {"role": "x"}}, {"offer": {"doors": [1], "functions": []}}]
)
def test_what_is_no_offer_is_named(header: dict[str, Any]) -> None:
    with pytest.raises(RemoteError, match="it sent no offer of this version of hf_dist"):
        Offer.of(header, "it")


@pytest.mark.parametrize("family", ["llama", "llava"])
def test_a_config_that_was_told_is_that_of_the_model(family: str) -> None:
    config = (
        make_model("llama", layers=1).config if family == "llama" else transformers.LlavaConfig(architectures=["Llava"])
    )
    told = told_config(json.loads(config.to_json_string(use_diff=False)), said_by="here")
    assert type(told) is type(config) and told.to_dict() == config.to_dict()
    assert architecture_of(told) == architecture_of(config)


def test_a_model_with_code_of_its_own_needs_a_folder() -> None:
    with pytest.raises(
        ConfigError, match=r"hf_dist.roles.teacher.model: is missing, and transformers knows no model 'own'"
    ):
        told_config({"model_type": "own"}, said_by="hf_dist.roles.teacher.model")


def test_a_role_that_has_nothing_to_do_is_known_by_where_it_waits() -> None:
    """The functions that the watchdog's table of activities names."""
    named = {file + function for file, function, words in _ACTIVITIES if words == WAITS_FOR_CALLS}
    there = {
        inspect.getsourcefile(each).rpartition("/hf_dist")[2] + each.__name__
        for each in (Server._received, Visits.next)
    }  # type: ignore[union-attr]
    assert {name.removeprefix("/hf_dist") for name in named} == there
