"""The issue order: equal on every rank whatever path a rank's data takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hf_dist.sharding.order import IssueOrder, merge

paths = st.lists(st.integers(0, 9), unique=True, max_size=10)


def issued(order: IssueOrder, path: list[int], prefetch: int) -> list[int]:
    """What one pass along `path` issues, with `prefetch` units ahead at each stop, and the rest at its end."""
    order.restart()
    done: list[int] = []
    for unit in path:
        done += [u for u in order.reach(unit) if u not in done]
        for _ in range(prefetch):
            if (ahead := order.peek()) is not None:
                order.advance()
                done.append(ahead)
    return done + order.rest()


@given(paths, st.data())
def test_every_path_issues_the_same_units_in_the_same_order(units: list[int], data: st.DataObject) -> None:
    for prefetch in (0, 1, 3):
        path = data.draw(st.lists(st.sampled_from(units), max_size=12)) if units else []
        assert issued(IssueOrder(units), path, prefetch) == units


@given(st.lists(paths, min_size=1, max_size=4))
def test_a_merged_order_holds_every_unit_once(orders: list[list[int]]) -> None:
    merged = merge(orders)
    assert sorted(merged) == sorted(set().union(*orders))
    assert [u for u in merged if u in orders[0]] == orders[0]


def test_what_only_a_later_rank_met_comes_where_it_came_there() -> None:
    assert merge([[0, 3, 4], [0, 1, 2, 3, 4]]) == [0, 1, 2, 3, 4]
    assert merge([[0, 1], [0, 1, 5], [7, 0, 1]]) == [7, 0, 1, 5]


def test_reach_issues_what_comes_before() -> None:
    order = IssueOrder([2, 0, 1])
    assert order.reach(0) == [2, 0]
    assert order.reach(0) == [0]
    assert order.ahead_of(2) == [0]
    assert order.peek() == 1
    assert order.rest() == [1] and order.rest() == [] and order.peek() is None
    assert order.seen == [0]


def test_a_unit_outside_the_order_is_issued_alone() -> None:
    order = IssueOrder([0, 1])
    assert order.reach(9) == [9]
    assert order.peek() == 0
    assert order.ahead_of(9) == []


def test_unused_units_come_last_and_do_not_count_as_the_last_unit() -> None:
    order = IssueOrder(range(4))
    assert order.last == 3
    order.replace([0, 2], unseen=[1, 2, 3])
    assert order.last == 2
    assert order.rest() == [0, 2, 1, 3]
    order.replace([])
    assert order.last is None and order.rest() == []


def test_a_new_pass_starts_from_the_beginning() -> None:
    order = IssueOrder([0, 1])
    order.reach(1)
    order.restart()
    assert order.seen == [] and order.peek() == 0
