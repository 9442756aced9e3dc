"""Roles divide the ranks of a start: every rank has one, neighbours share it, and what does not add up is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_dist.config import load_config
from hf_dist.config.roles import roles_of
from hf_dist.dist.roles import REST, dealt
from hf_dist.errors import ConfigError

SIZES = st.dictionaries(st.text("abc", min_size=1), st.integers(1, 6), min_size=2, max_size=5)


@given(SIZES, st.data())
def test_every_rank_has_one_role_and_the_rest_is_what_is_left(sizes: dict[str, int], data: st.DataObject) -> None:
    world = sum(sizes.values())
    open_ended = data.draw(st.sampled_from([None, *sizes]))
    asked: dict[str, int | str] = {name: REST if name == open_ended else size for name, size in sizes.items()}
    roles = dealt(asked, world)
    assert [r.size for r in roles.values()] == list(sizes.values())
    assert [rank for r in roles.values() for rank in range(r.first, r.first + r.size)] == list(range(world))


@given(SIZES, st.integers(1, 40), st.booleans())
def test_roles_that_do_not_add_up_are_refused(sizes: dict[str, int], world: int, with_rest: bool) -> None:
    asked: dict[str, int | str] = {**sizes, **({"rest": REST} if with_rest else {})}
    fits = sum(sizes.values()) < world if with_rest else sum(sizes.values()) == world
    if fits:
        assert len(dealt(asked, world)) == len(asked)
    else:
        with pytest.raises(ConfigError, match="hf_dist.roles"):
            dealt(asked, world)


WRONG = {
    "a number": (4, "at least two roles"),
    "one role": ({"trainer": {"ranks": 4}}, "at least two roles"),
    "no trainer": ({"a": {"ranks": 1, "model": "x"}, "b": {"ranks": 1, "model": "y"}}, "has a model, functions or a server in every role"),
    "two trainers": ({"a": {"ranks": 1}, "b": {"ranks": "rest"}}, "2 roles with neither model nor functions"),
    "a slip": ({"a": {"ranks": 1}, "b": {"rank": 1, "model": "y"}}, 'b.rank.*Did you mean "ranks"'),
    "no ranks": ({"a": {"ranks": 1}, "b": {"ranks": 0, "model": "y"}}, "b.ranks: 0"),
    "a flag": ({"a": {"ranks": 1}, "b": {"ranks": True, "model": "y"}}, "b.ranks: True"),
    "no object": ({"a": {"ranks": 1}, "b": 3}, "'b' that is no object"),
    "a list": ({"a": {"ranks": 1}, "b": {"ranks": 1, "model": "y", "config": []}}, "neither a path nor an object"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_section_is_refused_with_its_place(case: str) -> None:
    section, words = WRONG[case]
    with pytest.raises(ConfigError, match=words) as told:
        load_config({"hf_dist": {"roles": section}})
    assert told.value.problems[0].path == "hf_dist.roles"


def test_a_right_section_stays_as_it_is_written() -> None:
    section = {"trainer": {"ranks": "rest"}, "teacher": {"ranks": 2, "model": "x", "config": {"zero_optimization": {"stage": 3}}}}
    config = load_config({"hf_dist": {"roles": section}})
    found = roles_of(config.replaced({"bf16.enabled": (True, "a test")}).hf_dist.roles)
    assert list(found) == ["trainer", "teacher"] and found["teacher"].config == section["teacher"]["config"]
    assert not load_config({}).hf_dist.roles
