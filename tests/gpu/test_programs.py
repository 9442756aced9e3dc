"""The programs of this folder run: the benchmark in small, and what writes the results down."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.gpu import results
from tests.gpu.place import GPUS
from tests.harness import ROOT


@pytest.mark.skipif(GPUS > 0, reason="run_gpu.sh runs the benchmark itself")
def test_the_benchmark_runs_and_its_figures_are_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(results.VARIABLE, str(tmp_path))
    command = [sys.executable, "-m", "tests.gpu.bench_llama", "--small", "--rounds", "2", "--steps", "1"]
    done = forked.run(command, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stdout
    rounds = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["engine"] for row in rounds] == ["hf_dist", "fsdp2", "fsdp2", "hf_dist"]
    assert rounds[0]["loss"] == pytest.approx(rounds[1]["loss"], rel=1e-2), "the same work"
    results.record("memory", {"case": "z3", "planned": 2_000_000_000, "measured": 1_000_000_000})
    results.record("overhead", {"ranks": 2, "nbytes": 1_500_000_000})
    (tmp_path / "one.xml").write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/><testcase classname="a" name="bad"><failure/></testcase>'
        '<testcase classname="a" name="far"><skipped message="needs 4 GPUs, there are 1"/></testcase></testsuite></testsuites>'
    )
    text = results.section(tmp_path, "bash tests/run_gpu.sh")
    for part in (
        "1 failed, 1 not run, 1 passed", "not run (1): needs 4 GPUs, there are 1", "failed: `a::bad`", "torch 2.",
        "| z3 | 2.00 | 1.00 | 2.000 |", "| 2 | 1.50 |", "| seconds per step |",
    ):  # fmt: skip
        assert part in text, text


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
        monkeypatch.setattr(sys, "argv", ["results", str(tmp_path), number])
        results.main()
    text = written.read_text()
    assert text.startswith("# Results\n\nNothing yet.\n\n## ")
    assert text.index("`second`") < text.index("`first`") and text.count("\n## ") == 2
