"""A checkpoint is the same with and without offload, and any offload setting resumes from any other."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.covering import FULL_GRID
from tests.harness import run_ranks
from tests.memory.offload.test_parity import BF16, offload
from tests.memory.offload.training import differences, make_engine, states, train

SETTINGS = {"none": (2, ""), "cpu": (3, "cpu+cpu"), "nvme": (3, "nvme+nvme"), "part": (1, "nvme:0.5")}
"""Name -> (stage, kind of offload)."""
RESUMED = list(itertools.product(SETTINGS, SETTINGS))
if not FULL_GRID:  # each is read once, and reads another one's
    RESUMED = [("none", "nvme"), ("cpu", "none"), ("nvme", "part"), ("part", "cpu")]
BEFORE, AFTER = 2, 2 if FULL_GRID else 1


def engine_for(name: str, folder: str, **options: Any) -> Any:
    """An engine of one of the settings."""
    stage, kind = SETTINGS[name]
    return make_engine(offload(kind, folder), stage=stage, **BF16, **options)


def save_all(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Train, save, train on; under each setting. What was held at the save, and what came after it."""
    from hf_dist.checkpoint import folder as folders

    found = {}
    for name in SETTINGS:
        engine = engine_for(name, folder)
        train(engine, 0, BEFORE)
        engine.save_checkpoint(Path(folder) / name)
        assert not folders.incomplete(Path(folder) / name)
        found[name] = (sums(engine), train(engine, BEFORE, AFTER))
    return found


def load_all(rank: int, world: int, folder: str) -> dict[tuple[str, str], Any]:
    """Under each setting, the checkpoint of each setting."""
    found = {}
    for source, target in RESUMED:
        engine = engine_for(target, folder, seed=7)
        engine.load_checkpoint(Path(folder) / source)
        found[source, target] = (sums(engine), train(engine, BEFORE, AFTER))
    return found


def sums(engine: Any) -> dict[str, str]:
    """Hash of every master weight and optimizer state, whole. Collective."""
    from tests.checkpoint.grid import digests

    return digests(engine)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoints are."""
    return tmp_path_factory.mktemp("offloaded")


@pytest.fixture(scope="module")
def runs(folder: Path) -> tuple[list[Any], list[Any]]:
    """Saved on two ranks, loaded on two."""
    saved = run_ranks(save_all, 2, (str(folder),))
    return saved, run_ranks(load_all, 2, (str(folder),))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_checkpoint_holds_the_same_bits_with_and_without_offload(name: str, runs: Any) -> None:
    assert runs[0][0][name][0] == runs[0][0]["none"][0]


@pytest.mark.parametrize("pair", RESUMED, ids="-to-".join)
def test_any_offload_setting_resumes_from_any_other(pair: tuple[str, str], runs: Any) -> None:
    saved, loaded = runs
    for rank in range(2):
        held, after = loaded[rank][pair]
        assert held == saved[rank]["none"][0]
        assert after == saved[rank]["none"][1]


def resume_on_one(rank: int, world: int, folder: str) -> list[str]:
    """The checkpoint of two ranks on one: masters and states of the disk against those in memory."""
    held = []
    for name in ("none", "nvme"):
        engine = make_engine(offload("nvme+nvme" if name == "nvme" else "", folder), stage=3, **BF16)
        engine.load_checkpoint(Path(folder) / "nvme")
        held.append(states(engine))
    return differences(*held)


def test_another_number_of_ranks_resumes_onto_disk(folder: Path, runs: Any) -> None:
    assert run_ranks(resume_on_one, 1, (str(folder),)) == [[]]


def save_in_background(rank: int, world: int, folder: str) -> list[str]:
    """`async_save` with states on the host, then what a plain engine finds there."""
    engine = make_engine(offload("cpu+cpu", folder), stage=3, checkpoint={"async_save": True})
    train(engine, 0, BEFORE)
    engine.save_checkpoint(Path(folder) / "async")
    before = states(engine)
    train(engine, BEFORE, 1)  # must not reach the checkpoint
    engine.writer.wait()
    other = make_engine({}, stage=2, seed=7)
    other.load_checkpoint(Path(folder) / "async")
    return differences(before, states(other))


def test_a_background_save_of_offloaded_states_is_of_its_moment(tmp_path: Path) -> None:
    assert run_ranks(save_in_background, 1, (str(tmp_path),)) == [[]]
