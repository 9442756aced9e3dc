"""Every planted fault of the table can be planted in this package, and names tests that exist."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.table import MUTANTS

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "hf_dist"


def test_names_differ() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_can_be_planted_once_and_is_a_change_of_python(mutant: Mutant) -> None:
    text = (PACKAGE / mutant.file).read_text(encoding="utf-8")
    assert mutant.planted(text) != text
    compile(mutant.planted(text), mutant.file, "exec")
    assert mutant.tests and all((TESTS / test.split("::")[0]).exists() for test in mutant.tests), mutant.tests


def test_the_cases_that_find_faults_are_collected(request: pytest.FixtureRequest) -> None:
    """A grid that is thinned must keep them. Of files that this run has collected."""
    cases = {item.nodeid.removeprefix("tests/") for item in request.session.items}
    known = {part for case in cases for part in (case, case.split("[")[0], case.split("::")[0])}
    files = {case.split("::")[0] for case in cases}
    named = {test for mutant in MUTANTS for test in mutant.tests if test.split("::")[0] in files}
    assert sorted(named - known) == []


def test_a_fault_whose_line_has_changed_is_told() -> None:
    with pytest.raises(ValueError, match="2 times, not once"):
        Mutant("twice", "a.py", "x = 1\n", "x = 2\n", ()).planted("x = 1\nx = 1\n")
