"""The `hf-dist` command, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_dist.cli import doctor

REPO = Path(__file__).resolve().parent.parent


def hf_dist(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process and return what it said."""
    return subprocess.run(
        [sys.executable, "-m", "hf_dist.cli", *arguments],
        cwd=REPO,
        env={**os.environ, "COLUMNS": "120", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_env_prints_versions_devices_and_launch_variables() -> None:
    result = hf_dist("env", RANK="1", WORLD_SIZE="4", LOCAL_RANK="1", MASTER_ADDR="localhost", MASTER_PORT="29400")
    assert result.returncode == 0, result.stderr
    for word in ("python", "torch", "transformers", "accelerate", "cpu", "backends", "gloo", "MASTER_PORT", "29400"):
        assert word in result.stdout
    assert "rank 1 of 4, launcher: torchrun" in result.stdout


def test_doctor_tests_a_group_and_finds_nothing_wrong() -> None:
    result = hf_dist("doctor", "--ranks", "3")
    assert result.returncode == 0, result.stdout + result.stderr
    for word in ("transformers", "interfaces", "backends", "3 ranks", "GB/s sent per rank", "nothing is wrong"):
        assert word in result.stdout


def test_doctor_knows_pairs_of_versions_that_do_not_go_together() -> None:
    found = {"transformers": "5.23.0", "peft": "0.17.1", "accelerate": "0.9"}
    problems = "\n".join(doctor.version_problems(found))
    assert "transformers 5.23.0 with peft 0.17.1: peft imports names" in problems
    assert "needs accelerate" in problems, "what a package declares itself is checked, too"
    assert doctor.version_problems({"transformers": "5.23.0", "peft": "0.21.2"}) == []


def test_config_prints_the_resolved_table() -> None:
    result = hf_dist("config", "check", "configs/zero3.json")
    assert result.returncode == 0, result.stderr
    assert "zero_optimization.stage" in result.stdout


def test_config_of_a_wrong_file_names_the_key_and_exits_with_1(tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 7}}))
    result = hf_dist("config", "check", str(path))
    assert result.returncode == 1
    assert "zero_optimization.stage" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("text", [None, "{not json"], ids=["missing", "not_json"])
def test_config_that_cannot_be_read_exits_with_1_and_its_name(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "unreadable.json"
    if text is not None:
        path.write_text(text)
    result = hf_dist("config", "check", str(path))
    assert result.returncode == 1
    assert "unreadable.json" in result.stderr
    assert "Traceback" not in result.stderr
