"""Roles divide the ranks of a start: every rank has one, neighbours share it, and what does not add up is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_dist.config import load_config
from hf_dist.config.roles import asking_role, local_sizes, roles_of, serves_jobs
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
        with pytest.raises(ConfigError, match=r"hf_dist\.roles"):
            dealt(asked, world)


WRONG = {
    "a number": (4, "at least two roles"),
    "one role": ({"trainer": {"ranks": 4}}, "at least two roles"),
    "no trainer": ({"a": {"ranks": 1, "model": "x"}, "b": {"ranks": 1, "model": "y"}}, "has a model.* in every role"),
    "two trainers": ({"a": {"ranks": 1}, "b": {"ranks": "rest"}}, "2 roles with neither model nor functions"),
    "a slip": ({"a": {"ranks": 1}, "b": {"rank": 1, "model": "y"}}, 'b.rank.*Did you mean "ranks"'),
    "no ranks": ({"a": {"ranks": 1}, "b": {"ranks": 0, "model": "y"}}, "b.ranks: 0"),
    "a flag": ({"a": {"ranks": 1}, "b": {"ranks": True, "model": "y"}}, "b.ranks: True"),
    "no object": ({"a": {"ranks": 1}, "b": 3}, "'b' that is no object"),
    "an address": ({"a": {"ranks": 1}, "b": {"job": 3}}, "b.job: 3, which is no address"),
    "another job's layout": (
        {"a": {"ranks": 1}, "b": {"job": "h:1", "ranks": 2}},
        "b, a role of another job, with ranks",
    ),
    "a port": ({"b": {"ranks": 1, "model": "y", "port": 70000}}, "b.port: 70000"),
    "a script beside a port": (
        {"a": {"ranks": 1}, "b": {"ranks": 1, "model": "y", "port": 1}},
        "a, which runs the script, beside",
    ),
    "a role without a port": (
        {"a": {"ranks": 1, "model": "x"}, "b": {"ranks": 1, "model": "y", "port": 1}},
        "a, which has no port, beside",
    ),
    "a list": ({"a": {"ranks": 1}, "b": {"ranks": 1, "model": "y", "config": []}}, "neither a path nor an object"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_section_is_refused_with_its_place(case: str) -> None:
    section, words = WRONG[case]
    with pytest.raises(ConfigError, match=words) as told:
        load_config({"hf_dist": {"roles": section}})
    assert told.value.problems[0].path == "hf_dist.roles"


def test_a_right_section_stays_as_it_is_written() -> None:
    section = {
        "trainer": {"ranks": "rest"},
        "teacher": {"ranks": 2, "model": "x", "config": {"zero_optimization": {"stage": 3}}},
    }
    config = load_config({"hf_dist": {"roles": section}})
    found = roles_of(config.replaced({"bf16.enabled": (True, "a test")}).hf_dist.roles)
    assert list(found) == ["trainer", "teacher"] and found["teacher"].config == section["teacher"]["config"]
    assert not load_config({}).hf_dist.roles


def test_roles_of_other_jobs_take_no_ranks_and_say_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    section = {
        "trainer": {"ranks": "rest"},
        "teacher": {"job": "$TEACHER"},
        "judge": {"job": "[::1]:29700", "model": "x"},
    }
    found = roles_of(load_config({"hf_dist": {"roles": section}}).hf_dist.roles)
    assert list(dealt(local_sizes(found), 4)) == ["trainer"] == [asking_role(found)]
    assert found["judge"].address == ("::1", 29700)
    with pytest.raises(ConfigError, match=r"'\$TEACHER' is no address of a role"):
        _ = found["teacher"].address
    monkeypatch.setenv("TEACHER", "node7:29600")
    assert found["teacher"].address == ("node7", 29600)


def test_a_start_that_serves_other_jobs_needs_no_trainer() -> None:
    section = {"teacher": {"ranks": "rest", "model": "x", "port": 29600}}
    found = roles_of(load_config({"hf_dist": {"roles": section}}).hf_dist.roles)
    assert serves_jobs(found) and not asking_role(found) and dealt(local_sizes(found), 3)["teacher"].size == 3
