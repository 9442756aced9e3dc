"""The selection of a grid's cells leaves out no combination, and is much smaller than the grid."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.covering import cells, some_of

GRID = {"world": (1, 2, 3, 4), "stage": (0, 1, 2, 3), **dict.fromkeys(("a", "b", "c", "d"), (False, True))}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 3))
def test_every_combination_of_any_axes_is_in_a_cell(sizes: list[int], strength: int) -> None:
    axes = {f"axis{i}": tuple(range(size)) for i, size in enumerate(sizes)}
    found = cells(axes, strength, full=False)
    for chosen in itertools.combinations(axes, min(strength, len(axes))):
        wanted = set(itertools.product(*(axes[name] for name in chosen)))
        assert {tuple(cell[name] for name in chosen) for cell in found} == wanted


def test_what_is_not_allowed_is_in_no_cell_and_what_is_stays_covered() -> None:
    found = cells(GRID, 2, allowed=lambda cell: cell["world"] > 1 or cell["stage"] in (0, 3), full=False)
    pairs = {(cell["world"], cell["stage"]) for cell in found}
    assert pairs == set(itertools.product((2, 3, 4), (0, 1, 2, 3))) | {(1, 0), (1, 3)}


@pytest.mark.parametrize(("strength", "most"), [(2, 22), (3, 44)])
def test_a_cover_is_small_and_the_same_every_time(strength: int, most: int) -> None:
    found = cells(GRID, strength, full=False)
    assert len(found) <= most
    assert found == cells(GRID, strength, full=False)


def test_the_full_grid_is_the_product() -> None:
    assert len(cells(GRID, full=True)) == 4 * 4 * 2**4


def test_named_cases_keep_their_order_and_a_name_without_a_case_is_told() -> None:
    grid = {"a": 1, "b": 2, "c": 3}
    assert list(some_of(grid, "c", "a", full=False)) == ["a", "c"]
    assert some_of(grid, "a", full=True) == grid
    with pytest.raises(KeyError, match="no such cases"):
        some_of(grid, "d", full=False)
