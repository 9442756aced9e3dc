"""A library that loads checkpoints itself resumes at another stage: sentence-transformers, with names of its own."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.covering import FULL_GRID
from tests.ecosystem.savers import save_masked
from tests.ecosystem.test_saving import assert_same_folder
from tests.ecosystem.tiny import save_example_models
from tests.harness import run_ranks
from tests.hf.on_ranks import run_jobs

ROUTES: dict[int | None, list[int | None]] = {None: [], 1: [3, 0], 3: [1]}
"""From one stage to others; None is plain DDP, which never stops."""
KINDS = ("dense", "lora")
CASES: list[tuple[int | None, str]] = [(None, "lora"), (3, "lora")]  # `test_saving.py` has "dense"
if FULL_GRID:
    CASES = [(first, kind) for first in ROUTES for kind in KINDS]


@functools.cache
def results(root: Path) -> dict[tuple[str, int | None], Any]:
    """By kind and first stage, what every run gave; one spawn."""
    save_example_models(root)
    save_masked(root)
    cases = [(kind, first) for first, kind in CASES]  # DDP first: later, models are read when they are sharded
    jobs = [
        ("tests.ecosystem.savers:resumed", {"kind": kind, "first": first, "then": ROUTES[first], "root": str(root)})
        for kind, first in cases
    ]
    return dict(zip(cases, run_ranks(run_jobs, 2, (jobs, str(root)), timeout=400)[0], strict=True))


@pytest.mark.parametrize(("first", "kind"), CASES)
def test_the_last_step_is_that_of_a_run_that_never_stopped(
    kind: str, first: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = results(tmp_path_factory.getbasetemp())
    for case in ((kind, None), (kind, first)):
        assert not isinstance(found[case], str), found[case]
    expected = found[kind, None][0]
    assert len(expected["losses"]) == 3
    for run in found[kind, first]:
        assert run["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert_same_folder(run["saved"], expected["saved"])
