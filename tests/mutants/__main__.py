"""Plants every fault of the table in a copy of the package, one at a time, and runs the tests that should notice.

    python -m tests.mutants                   # all of them, two at a time; hours
    python -m tests.mutants norm schedule     # those whose name or file has one of the words
    python -m tests.mutants --cells norm      # every case that fails, not only the first
    python -m tests.mutants --tests tests     # the whole suite instead of the tests named in the table

A line per fault: killed or not, the first case that failed, seconds. `--output FILE` adds the outcome as JSON lines;
`python -m tests.mutants.report FILE...` makes MUTANTS.md of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import pytest

from tests import processes, second_try
from tests.mutants.mutant import Mutant
from tests.mutants.table import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("hf_dist", "tests", "configs", "examples", "pyproject.toml", "README.md")
LIMIT = 3600.0
"""Seconds for the tests of one fault; one that makes them hang is killed by that."""


def copy_of_the_repository(folder: Path) -> Path:
    """A copy without git, caches and environments."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def outcome(mutant: Mutant, tests: list[str], cells: bool) -> dict[str, Any]:
    """Plant it and run: which cases failed, and how long it took."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hf_dist-mutant-", ignore_cleanup_errors=True) as name:
        copy = copy_of_the_repository(Path(name))
        mutant.plant(copy / "hf_dist")
        found = copy / "failed.json"
        chosen = tests or [f"tests/{test}" for test in mutant.tests]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:durations",
            "-p",
            "no:xdist",
        ]
        command += [*([] if cells else ["-x"]), *chosen]
        environment = {**os.environ, "PYTHONPATH": name, "OMP_NUM_THREADS": "1", second_try.VARIABLE: str(found)}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        try:
            done = processes.run(command, cwd=copy, env=environment, timeout=LIMIT)
            said = json.loads(found.read_text()) if found.exists() else {"errors": {}, "uncollected": True}
            if done.returncode in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
                raise ValueError(f"{mutant.name}: {chosen} are no tests: {done.stdout[-300:]}{done.stderr[-300:]}")
            failed = list(said["errors"]) or (["(not collected)"] if said["uncollected"] else [])
            if not failed and done.returncode:
                failed = [f"(exit code {done.returncode})"]
        except TimeoutExpired:
            failed = ["(hangs)"]
    return {"name": mutant.name, "file": mutant.file, "failed": failed, "seconds": round(time.monotonic() - start)}


def main() -> None:
    """Run what the command line chooses; exit status 1 if a fault survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="in the name or file of a fault")
    parser.add_argument("--cells", action="store_true", help="run on after the first failure")
    parser.add_argument("--tests", nargs="+", default=[], help="instead of those of the table")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument("--output", type=Path, help="JSON lines are added to this file")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.words or any(w in m.name or w in m.file for w in options.words)]
    survived = 0

    def run(mutant: Mutant) -> None:
        nonlocal survived
        result = outcome(mutant, options.tests, options.cells)
        survived += not result["failed"]
        first = result["failed"][0] if result["failed"] else "-"
        more = f" and {len(result['failed']) - 1} more" if len(result["failed"]) > 1 else ""
        killed = "killed  " if result["failed"] else "SURVIVED"
        print(f"{killed} {result['seconds']:5} s  {mutant.file}: {mutant.name}  <- {first}{more}", flush=True)
        if options.output:
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, chosen))
    print(f"{len(chosen)} faults, {survived} survived")
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()
