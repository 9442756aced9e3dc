"""What the last line in the log of a launched job is, whoever got the signal that ends it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_dist.dist import last_words
from tests import processes
from tests.harness import ROOT

LAUNCHER = """
import os, subprocess, sys
folder, restarts = sys.argv[1:]
rank = "from hf_dist.dist.last_words import outlive_launcher; print(outlive_launcher('the last line'), flush=True)"
variables = {"TORCHELASTIC_ERROR_FILE": f"{folder}/attempt_0/0/error.json"} if folder else {}
subprocess.run([sys.executable, "-c", rank], env={**os.environ, **variables}, start_new_session=True)
if restarts:
    os.mkdir(f"{folder}/attempt_1")
print("the launcher's own words", flush=True)
"""


@pytest.mark.parametrize("case", ["ends", "starts again", "is none"])
def test_the_last_line_comes_after_the_launchers_unless_it_starts_the_ranks_again(case: str, tmp_path: Path) -> None:
    words = ["" if case == "is none" else str(tmp_path), "restarts" if case == "starts again" else ""]
    done = processes.run(
        [sys.executable, "-c", LAUNCHER, *words], timeout=60, cwd=ROOT, stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": ROOT, "TORCHELASTIC_ERROR_FILE": ""},
    )  # fmt: skip
    last = ["the last line"] if case == "ends" else []
    assert done.stdout.splitlines() == [str(case != "is none"), "the launcher's own words", *last]


@pytest.mark.parametrize("heard", list(itertools.product([False, True], repeat=3)))
def test_one_way_of_speaking_whoever_heard_the_signal(heard: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher reads a file of the rank that fails first, whichever that is, or none if it got the signal itself."""
    spoken: list[str] = []
    monkeypatch.setattr(last_words, "tell_launcher", lambda message: spoken.append("file"))
    monkeypatch.setattr(last_words, "outlive_launcher", lambda message: spoken.append("beside"))
    for local_rank in range(len(heard)):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        last_words.end_log_with("words", heard=heard[0])
    assert spoken == (["beside"] if heard[0] else ["file"] * len(heard))
