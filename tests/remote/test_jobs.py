"""A job that serves a role outlives the jobs that ask it: one after another, of any size, also those that are killed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dist.dist.ports import HeldPort
from tests.harness import run_ranks
from tests.remote.jobs import distil, save_models
from tests.sharding.loop import TOLERANCE, difference
from tests.workers.launcher import launch
from tests.workers.visiting import kill_the_teacher

WORKER = "tests.workers.visiting"


def job(home: Path, case: str, ranks: int) -> tuple[list[int | None], str, Path]:
    """Codes, what was said, and the folder of a job."""
    folder = home / f"{case}{ranks}"
    folder.mkdir()
    codes, said, _ = launch(case, folder, ranks, 600 if case == "serves" else 120, WORKER)
    return codes, said, folder


def test_one_trainer_after_another_asks_a_job_that_outlives_them(tmp_path: Path) -> None:
    save_models(str(tmp_path))
    with HeldPort() as port:
        (tmp_path / "port").write_text(str(port.number))
        try:
            for said in _scenario(tmp_path):
                assert "Traceback" not in said, said
        finally:
            kill_the_teacher(tmp_path)


def _scenario(home: Path) -> Iterator[str]:
    serving: list[Any] = []
    thread = threading.Thread(target=lambda: serving.append(job(home, "serves", 2)))
    thread.start()
    alone = run_ranks(distil, 1, (str(home), {"zero_optimization": {"stage": 2}}))[0]
    for ranks in (2, 1):
        codes, said, folder = job(home, "distils", ranks)
        assert codes == [0] * ranks, said
        _equals(torch.load(folder / "found.pt"), alone)
        yield said
    codes, said, _ = job(home, "trainer_killed", 2)
    assert codes[1] == -9 and None not in codes, said
    codes, said, _ = job(home, "calls", 1)
    assert codes == [0], said
    yield said
    codes, said, _ = job(home, "teacher_killed", 2)
    assert 0 not in codes and None not in codes, said
    assert "lost the connection to data rank 0 of role teacher, which ended first" in said
    thread.join()
    codes, said, _ = serving[0]
    assert set(codes) == {-9}, said
    _is_told(said)
    yield said


def _equals(found: dict[str, Any], alone: dict[str, Any]) -> None:
    for key in ("losses", "norms"):
        assert found[key] == pytest.approx(alone[key], rel=1e-5), key
    worst = max(difference(found["weights"][name], value) for name, value in alone["weights"].items())
    assert worst <= TOLERANCE


def _is_told(said: str) -> None:
    """The log of the job that served."""
    for words in (
        "role teacher: other jobs may ask at 127.0.0.1, port",
        "answered 7 calls of the job at 127.0.0.1 (2 data ranks), which has ended",
        "answered 7 calls of the job at 127.0.0.1 (1 data rank), which has ended",
        "(2 data ranks), which is gone: data rank 1 of the job at 127.0.0.1 has ended",
        "does not know HF_DIST_SECRET of this job. Others from there are refused without a word",
    ):
        assert words in said, (words, said)
    assert said.count("refused a connection") == 1, said
