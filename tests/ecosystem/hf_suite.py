"""Hugging Face's own tests of its Trainer, stock and under us: `python -m tests.ecosystem.hf_suite --checkout DIR`.

The tests are not part of this repository: DIR is a checkout of transformers, best of the installed version. Each file runs in
processes of its own, once with the stock classes and once per ZeRO stage with ours under the stock names (`hf_dist.run`), on
one process without the network. A table of the tests that differ is printed, as JUnit's reports tell them. Names that a test
imports and the installed version has dropped are put in as empty ones: tests that use them fail on both sides.

`--open require_deepspeed --files tests/deepspeed/test_deepspeed.py`: tests that name a config themselves, behind decorators
that want DeepSpeed's package, under us alone; all that do not pass are listed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from xml.etree import ElementTree

from tests import forked, processes

FILES = (
    "tests/trainer/test_trainer.py",
    "tests/trainer/test_trainer_seq2seq.py",
    "tests/trainer/test_trainer_callback.py",
    "tests/trainer/test_trainer_utils.py",
    "tests/trainer/test_training_args.py",
    "tests/trainer/test_trainer_checkpointing.py",
    "tests/trainer/test_trainer_data.py",
    "tests/trainer/test_trainer_evaluation.py",
    "tests/trainer/test_trainer_optimizers.py",
    "tests/trainer/test_trainer_accelerator.py",
    "tests/trainer/test_trainer_hyperparameter.py",
)
"""Of one process; those that a checkout lacks are left out (they were one file before 5.3)."""
PACKAGES = ("transformers", "torch", "accelerate", "hf-dist")
STOCK = "stock"
HERE = Path(__file__).with_name("HF_SUITE.md")
"""Results, with a reason for each difference."""
_ROOT = Path(__file__).parents[2]
_INSIDE = "--inside"
"""First argument of the process that runs pytest: in it `tests` is the checkout's package, not ours."""


@dataclass(frozen=True)
class Outcome:
    """What became of one test: "passed", "failed" or "skipped", and the first line of its error."""

    result: str
    words: str = ""


Outcomes = dict[str, Outcome]


def read_report(path: Path) -> Outcomes:
    """The outcome of each test of a JUnit report, by class and name."""
    found: Outcomes = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        failure = next((child for tag in ("failure", "error") for child in case.iter(tag)), None)
        if failure is not None:
            found[name] = Outcome("failed", (failure.get("message") or "").strip().split("\n")[0])
        else:
            found[name] = Outcome("skipped" if case.find("skipped") is not None else "passed")
    return found


def run_file(
    checkout: Path, file: str, column: str, more: list[str], folder: Path, limit: float, is_real: bool = True
) -> Outcomes:
    """The tests of one file: with the stock classes, or ours at a ZeRO stage, or ours with what the tests name.

    `is_real`: not forked.
    """
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    # Without the checkout's conftest: it puts the checkout's `src` before the installed version.
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--noconftest", f"--junitxml={report}"]
    pytest = [str(Path(__file__)), _INSIDE, *options, file, *more]
    command = [sys.executable, *pytest]
    if column != STOCK:
        command = [sys.executable, "-m", "hf_dist.run", *named_config(column, folder), *pytest]
    # The checkout's folder named `tests` comes first, not ours.
    paths = [str(checkout), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    try:
        done = (processes if is_real else forked).run(command, cwd=checkout, env=env, timeout=limit)
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"{file}: not done after {limit:.0f} s:\n{late.stdout!r:.4000}") from late
    if not report.exists():
        raise RuntimeError(f"{file}: no report; the end of its output:\n{(done.stdout + done.stderr)[-4000:]}")
    return read_report(report)


def named_config(column: str, folder: Path) -> list[str]:
    """The option of `hf_dist.run` for a column "stage N"."""
    if not column.startswith("stage "):
        return []
    stage = int(column.removeprefix("stage "))
    config = folder / f"zero{stage}.json"
    sizes = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    # Tests compare the records of the log: without our columns.
    ours = {"hf_dist": {"log_measurements": False}}
    config.write_text(json.dumps({"zero_optimization": {"stage": stage}, **sizes, **ours}))
    return ["--config", str(config)]


def open_decorators(names: list[str]) -> None:
    """Have decorators of transformers' testing utilities that skip tests let them run."""
    utilities = importlib.import_module("transformers.testing_utils")
    for name in names:
        setattr(utilities, name, lambda test: test)


class ForgottenNames:
    """A plugin of pytest: what a test file imports from transformers and the installed version does not have."""

    def pytest_collect_file(self, file_path: Path) -> None:
        """Before the file is imported."""
        if file_path.suffix != ".py":
            return
        for node in ast.walk(ast.parse(file_path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
                with contextlib.suppress(ImportError):
                    add_missing(importlib.import_module(str(node.module)), [alias.name for alias in node.names])


def add_missing(module: Any, names: list[str]) -> None:
    """Give `module` an empty object for each of `names` that it lacks."""
    for name in names:
        try:
            getattr(module, name)
        except (AttributeError, ImportError):
            setattr(module, name, MagicMock(name=name))


def columns_of(
    checkout: Path, columns: list[str], files: list[str], more: list[str], limit: float, is_real: bool = True
) -> dict[str, Outcomes]:
    """The outcomes of all files, by column."""
    found: dict[str, Outcomes] = {}
    with tempfile.TemporaryDirectory() as folder:
        for column in columns:
            outcomes = found.setdefault(column, {})
            for file in files:
                if (checkout / file).exists():
                    outcomes.update(run_file(checkout, file, column, more, Path(folder), limit, is_real))
    return found


def differences(found: dict[str, Outcomes]) -> list[str]:
    """The tests that pass stock and do not under us, sorted; without a stock column all that were run and do not pass."""
    ours = [column for name, column in found.items() if name != STOCK]
    missing = Outcome("missing")
    if STOCK not in found:
        return sorted({name for column in ours for name, outcome in column.items() if outcome.result == "failed"})
    return sorted(
        name
        for name, outcome in found[STOCK].items()
        if outcome.result == "passed" and any(column.get(name, missing).result != "passed" for column in ours)
    )


def table(found: dict[str, Outcomes], reasons: dict[str, str]) -> str:
    """Counts of every column, and each difference with its reason, as Markdown."""
    names = [name for name in found if name != STOCK]
    lines = ["| | passed | failed | skipped |", "|---|---|---|---|"]
    for column, outcomes in found.items():
        counts = Counter(outcome.result for outcome in outcomes.values())
        lines.append(f"| {column} | {counts['passed']} | {counts['failed']} | {counts['skipped']} |")
    lines += ["", f"| test | {' | '.join(names)} | why |", f"|---{'|---' * len(names)}|---|"]
    for test in differences(found):
        outcomes = [found[name].get(test, Outcome("missing")) for name in names]
        said = next((outcome.words for outcome in outcomes if outcome.words), "")
        why = reasons.get(test, f"NOT EXPLAINED: {said}"[:150]).replace("|", "/")
        lines.append(f"| `{test}` | {' | '.join(outcome.result for outcome in outcomes)} | {why} |")
    return "\n".join(lines)


def read_reasons(path: Path) -> dict[str, str]:
    """The reasons in a table that `table` has written and somebody has filled."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [line.split("|") for line in lines if line.startswith("| `")]
    return {row[1].strip().strip("`"): row[-2].strip() for row in rows}


def main() -> None:
    """Run, and print the table; the exit status is 1 where a difference has no reason."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of transformers")
    parser.add_argument("--stages", type=int, nargs="*", default=[1, 3])
    parser.add_argument("--files", nargs="*", default=list(FILES), help="relative to the checkout")
    parser.add_argument("--open", nargs="*", default=[], help="decorators that skip tests, as if they were not there")
    parser.add_argument("-k", dest="expression", help="pytest's selection of tests")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for one file in one column")
    parser.add_argument("--reasons", type=Path, default=HERE)
    given = parser.parse_args()
    more = [f"--open={name}" for name in given.open] + (["-k", given.expression] if given.expression else [])
    columns = ["ours"] if given.open else [STOCK, *(f"stage {stage}" for stage in given.stages)]
    found = columns_of(given.checkout.absolute(), columns, given.files, more, given.limit)
    reasons = read_reasons(given.reasons)
    print(", ".join(f"{name} {version(name)}" for name in PACKAGES))
    print(table(found, reasons))
    sys.exit(any(test not in reasons for test in differences(found)))


if __name__ == "__main__" and sys.argv[1:2] == [_INSIDE]:
    import pytest

    sys.path.remove(str(Path(__file__).parent))
    words = sys.argv[2:]
    open_decorators([word.removeprefix("--open=") for word in words if word.startswith("--open=")])
    words = [word for word in words if not word.startswith("--open=")]
    sys.exit(pytest.main(words, plugins=[ForgottenNames()]))
elif __name__ == "__main__":
    main()
