"""The programs of this folder: the calls of `run_gpu.sh`, and what writes the results down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.gpu import calls, results, simulated
from tests.gpu.place import GPUS
from tests.gpu_sim import library
from tests.gpu_sim.server import simulate
from tests.harness import ROOT


def test_what_was_measured_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(results.VARIABLE, str(tmp_path))
    results.record("memory", {"case": "z3", "planned": 2_000_000_000, "measured": 1_000_000_000})
    results.record("overhead", {"ranks": 2, "nbytes": 1_500_000_000})
    results.record("speed", {"engine": "fsdp2", "tokens/s": "1,234", "MFU": "0.412"})
    (tmp_path / "one.xml").write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/><testcase classname="a" name="bad"><failure/></testcase>'
        '<testcase classname="a" name="far"><skipped message="needs 4 GPUs, there are 1"/></testcase></testsuite></testsuites>'
    )
    text = results.section(tmp_path, "bash tests/run_gpu.sh one", ["test_late.py"])
    for part in (
        "1 failed, 1 not run, 1 passed", "not run (1): needs 4 GPUs, there are 1", "failed: `a::bad`", "torch 2.",
        "| z3 | 2.00 | 1.00 | 2.000 |", "| 2 | 1.50 |", "| fsdp2 | 1,234 | 0.412 |", "(no time left): test_late.py",
    ):  # fmt: skip
        assert part in text, text


def test_versions_are_told_where_a_package_is_only_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is tested, for instance."""
    monkeypatch.setattr(results, "PACKAGES", ("torch", "not-installed"))
    assert "no not-installed" in results.machine()[0] and "hf_dist 0." in results.machine()[0]


@pytest.mark.skipif(library.why_not() is not None, reason=str(library.why_not()))
def test_what_was_simulated_for_the_comparison_is_what_the_simulator_says() -> None:
    """On a GPU, whose torch cannot simulate, the file stands for it."""
    kept = json.loads(simulated.KEPT.read_text(encoding="utf-8"))
    name = "zero3"
    (found,) = simulate("tests.gpu.simulated:run_simulated", simulated.SETTINGS[name])
    assert set(kept) == set(simulated.SETTINGS)
    assert found["waits"] == kept[name]["waits"]
    assert found["kernels"] == pytest.approx(kept[name]["kernels"], rel=0.2), "python -m tests.gpu.simulated --keep"


def test_a_missing_package_is_named_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(calls, "missing", lambda: ["pydantic", "typer"])
    assert calls.main(["one"]) == 2
    said = capsys.readouterr().out
    assert said.startswith("missing: pydantic, typer. Run: pip install pydantic typer\n") and "Nothing was run" in said


@pytest.mark.skipif(GPUS > 0, reason="there is one")
def test_without_a_gpu_nothing_runs_and_it_ends_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(calls.REHEARSE, raising=False)
    assert calls.main(["one"]) == 0
    assert capsys.readouterr().out.startswith("no GPU")


def test_a_call_goes_on_where_it_has_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done is not run again, what was cut off is; a step begins only if there is time."""
    monkeypatch.setattr(calls, "STATE", tmp_path / "state")
    monkeypatch.setattr(calls, "CALLS", {"one": ("quick", "slow", "late")})
    monkeypatch.setenv(calls.REHEARSE, "1")
    monkeypatch.setenv("OUT", str(tmp_path))
    ran: list[str] = []

    def run(command: list[str], timeout: float, **how: Any) -> Any:
        name = command[-1].rpartition(".")[2]
        ran.append(name)
        if name == "slow" and ran.count("slow") == 1:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 3 if name == "late" else 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert [step.outcome for step in calls.run_call("one", 30, [])] == ["done", "cut off", "failed"]
    assert [step.outcome for step in calls.run_call("one", 30, [])] == ["done before", "done", "done before"]
    assert ran == ["quick", "slow", "late", "slow"]
    assert [s["outcome"] for s in json.loads((tmp_path / "one.json").read_text())["steps"]] == [
        "done before",
        "done",
        "done before",
    ]
    assert calls.run_step("never", tmp_path, 1, []).outcome == "no time"


@pytest.mark.skipif(GPUS > 0, reason="there are real ones")
def test_what_runs_on_gpus_is_found_there_and_skipped_by_how_many_there_are(tmp_path: Path) -> None:
    script = tmp_path / "collect.py"
    script.write_text(
        "import sys, pytest, torch\n"
        "torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)\n"
        "sys.exit(pytest.main(['-q', '-rs', '-p', 'no:cacheprovider', 'tests/gpu/test_parity.py', 'tests/gpu/test_pipeline.py',"
        " 'tests/gpu/test_ranks.py', '-k', 'w1 and 4- or pp4 or two_gpus or one_queue or groups_of_two']))\n"
    )
    done = forked.run([sys.executable, str(script)], cwd=ROOT, env={**os.environ, "PYTHONPATH": ROOT}, timeout=200)
    assert done.returncode == 0, done.stdout
    for count in (2, 4, 8):
        assert f"needs {count} GPUs, there are 1" in done.stdout, done.stdout
    assert " skipped" in done.stdout and "passed" not in done.stdout


def test_the_newest_run_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "RESULTS.md"
    written.write_text("# Results\n\nNothing yet.\n")
    monkeypatch.setattr(results, "RESULTS", written)
    for number in ("first", "second"):
        results.write(tmp_path, number, [])
    text = written.read_text()
    assert text.startswith("# Results\n\nNothing yet.\n\n## ")
    assert text.index("`second`") < text.index("`first`") and text.count("\n## ") == 2
