"""Cut matrices with everything else: pipeline, HSDP, offload, budget, a step in backward. And checkpoints between layouts."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.parallel.tensor.layouts import Layout, load_all, run_all, run_save_load
from tests.parity.train import relative
from tests.references import shared

TOLERANCE = 1e-5
TWO = [
    Layout(tp=2, stage=1, more="offload"),
    Layout(tp=2, stage=3, more="offload_all", sequence=True),
    Layout(tp=2, stage=3, more="budget"),
    Layout(tp=2, stage=2, more="in_backward"),
    Layout(tp=2, stage=3, more="tiles", sequence=True),
    Layout(tp=2, stage=1, more="whole_logits", tied=False),
    Layout(tp=2, stage=1, more="every_second", sequence=True),
    Layout(tp=2, stage=1, more="selective", sequence=True),
    Layout(tp=2, stage=3, more="partition", sequence=True),
    Layout(tp=2, stage=3, more="overlap", sequence=True),
    Layout(tp=2, stage=1, more="overlap", checkpointing=True),
    Layout(tp=2, stage=3, more="dora", sequence=True),
]
if not FULL_GRID:  # `partition`, `overlap`: files of their own
    TWO = [layout for layout in TWO if layout.more in ("offload_all", "in_backward", "tiles")]
FOUR = [
    Layout(tp=4, stage=1, sequence=True),  # two heads of keys and values
    Layout(tp=4, stage=3, lora=True, checkpointing=True),
    *(
        [
            Layout(tp=2, dp=2, stage=3, more="hsdp"),
            Layout(tp=4, stage=0, tied=False, more="overlap"),
            Layout(tp=2, pp=2, stage=0),
            Layout(tp=2, pp=2, stage=3),
            Layout(tp=2, pp=2, stage=1, tied=False, checkpointing=True),
            Layout(tp=2, pp=2, stage=1, lora=True),
            Layout(tp=2, dp=2, stage=3, more="budget", sequence=True),
            Layout(tp=2, dp=2, stage=2, more="in_backward"),
            Layout(tp=2, dp=2, stage=3, more="hsdp", sequence=True, lora=True),
            *(Layout(tp=4, stage=stage, sequence=s) for stage in (0, 2, 3) for s in (False, True)),
            Layout(tp=4, stage=3, lora=True, sequence=True),
        ]
        if FULL_GRID
        else []
    ),
]
SAVED = {
    1: [Layout(stage=1)],
    2: [Layout(dp=2, stage=3), Layout(tp=2, stage=0), Layout(tp=2, stage=3, sequence=True)],
    4: [Layout(tp=4, stage=1), Layout(pp=2, tp=2, stage=1)],
}
if not FULL_GRID:  # four ranks: `parity/test_mixed_life.py`
    SAVED[2].remove(Layout(tp=2, stage=0))
    SAVED[4].clear()
else:
    SAVED[4] += [Layout(dp=4, stage=3), Layout(dp=2, tp=2, stage=3, sequence=True)]


EVERY = list(itertools.chain(*SAVED.values()))
PAIRS = [
    (str(saved), layout)
    for i, saved in enumerate(EVERY)
    for j, layout in enumerate(EVERY)
    if i != j and (FULL_GRID or j == 0 or (i, j) in ((2, 1), (1, 2)))
]
"""Saved by, and loaded by: what each layout saves is loaded by one process, and each loads what another saved.

More ranks load what fewer saved in the spawn of their cells; the other way round is a spawn of its own.
"""


def pairs_of(world: int, later: bool) -> list[tuple[str, Layout]]:
    """Those that so many ranks load, of what has been saved when their cells run, or is saved `later`, by more ranks."""
    ranks = {str(layout): layout.world for layout in EVERY}
    return [(name, layout) for name, layout in PAIRS if layout.world == world and (ranks[name] > world) == later]


def alone(layout: Layout) -> Layout:
    """The same work in one process."""
    more = layout.more if layout.more in ("in_backward", "dora") else ""
    return Layout(family=layout.family, tied=layout.tied, lora=layout.lora, more=more)


def reference(layout: Layout) -> Any:
    return shared(("tensor", layout), lambda: run_ranks(run_all, 1, ([layout],))[0][0])


CELLS: dict[int, list[Layout]] = {1: [], 2: TWO, 4: FOUR}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("layouts"))


@functools.cache
def ran(world: int, root: str) -> list[tuple[list[Any], dict[str, Any], dict[tuple[str, str], Any]]] | str:
    """By rank: its cells, what it saved, what it loaded; after those of fewer ranks."""
    for fewer in SAVED:
        if fewer < world and isinstance(found := ran(fewer, root), str):
            return found
    try:
        work = (root, CELLS[world], SAVED[world], pairs_of(world, later=False))
        return run_ranks(run_save_load, world, work, timeout=1500)
    except RuntimeError as error:
        return str(error)


def check(ranks: list[Any], expected: Any) -> None:
    for outcome in ranks:
        assert not isinstance(outcome, str), outcome
    (losses, norms), weights = expected
    for (own_losses, own_norms), own in ranks:
        assert own_losses == pytest.approx(losses, rel=TOLERANCE)
        assert own_norms == pytest.approx(norms, rel=TOLERANCE)
        for name, weight in own.items():
            assert relative(weight, weights[name]) < TOLERANCE, name
    assert {name for _, own in ranks for name in own} == weights.keys()


@pytest.mark.parametrize(
    ("world", "index"),
    [pytest.param(w, i, id=str(layout)) for w, rows in ((2, TWO), (4, FOUR)) for i, layout in enumerate(rows)],
)
def test_equals_one_process(world: int, index: int, root: str) -> None:
    everyone = ran(world, root)
    assert not isinstance(everyone, str), everyone
    check([cells[index] for cells, *_ in everyone], reference(alone((TWO if world == 2 else FOUR)[index])))


@pytest.fixture(scope="module")
def saved(root: str) -> dict[str, list[Any]]:
    """Layout -> what every rank went on with."""
    found: dict[str, list[Any]] = {}
    for world, layouts in SAVED.items():
        everyone = ran(world, root)
        assert not isinstance(everyone, str), everyone
        found |= {str(layout): [saved[str(layout)] for _, saved, _ in everyone] for layout in layouts}
    return found


@pytest.fixture(scope="module")
def loaded(saved: dict[str, list[Any]], root: str) -> dict[tuple[str, str], list[Any]]:
    """(saved layout, layout that loaded it) -> what every rank went on with."""
    found: dict[tuple[str, str], list[Any]] = {}
    for world in SAVED:
        ranks = [loaded for *_, loaded in ran(world, root)]
        found |= {key: [rank[key] for rank in ranks] for key in ranks[0]}
        if pairs := pairs_of(world, later=True):
            ranks = run_ranks(load_all, world, (root, pairs), timeout=600)
            found |= {key: [rank[key] for rank in ranks] for key in ranks[0]}
    return found


def test_a_checkpoint_of_any_layout_goes_on_in_any_other(
    saved: dict[str, list[Any]], loaded: dict[tuple[str, str], list[Any]]
) -> None:
    expected = saved[str(Layout(stage=1))][0]
    assert len(loaded) >= 2 * len(saved) - 2 and len(loaded) == len(PAIRS)
    for ranks in (*saved.values(), *loaded.values()):
        check(ranks, expected)


def test_the_files_of_a_model_that_is_cut_are_those_of_one_process(saved: Any, root: str) -> None:
    wanted = Path(root, f"{Layout(stage=1)}-new", "model.safetensors").read_bytes()
    for layouts in SAVED.values():
        for layout in layouts:
            assert Path(root, f"{layout}-new", "model.safetensors").read_bytes() == wanted, str(layout)


def test_layouts_have_names_of_their_own() -> None:
    names = [str(layout) for layouts in (TWO, FOUR) for layout in layouts]
    assert len(set(names)) == len({replace(layout, tied=True) for layout in (*TWO, *FOUR)}) or FULL_GRID
