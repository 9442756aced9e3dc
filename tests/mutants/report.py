"""Writes MUTANTS.md from what `python -m tests.mutants --output FILE` wrote; the last line of a fault counts.

python -m tests.mutants.report FILE...
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from tests.mutants.table import MUTANTS

PAGE = Path(__file__).resolve().parents[1] / "MUTANTS.md"
WIDTH = 160
"""Of a line; a case is shown as far as there is room."""
HEAD = """# Planted faults, and what finds them

`python -m tests.mutants` plants each fault in a copy of the package and runs the tests that its row in
`tests/mutants/of_*.py` names; `python -m tests.mutants.report FILE` writes this page. A fault that survives is a missing
test: write it.

"before" is the suite of 7,090 cases that ran by default before its grids were cut down (November 2026): "same" where the
case that finds the fault was one of them, "no" where no file that the fault touches found it, so that a test was written.
"""


def killer(found: dict[str, list[str]], name: str, room: int) -> str:
    """The first case that failed, short; "-" if none did."""
    if name not in found:
        return "not run yet"
    return f"`{found[name][0].removeprefix('tests/')[:room]}`" if found[name] else "**survives**"


def page(files: list[Path], before: set[str]) -> str:
    """The whole page; `before`: the cases of the older suite."""
    found: dict[str, list[str]] = {}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            outcome = json.loads(line)
            found[outcome["name"]] = outcome["failed"]
    lines = ["| file | fault | found by | before |", "|---|---|---|---|"]
    counts: Counter[str] = Counter()
    for mutant in MUTANTS:
        failed = found.get(mutant.name, [])
        was = "same" if failed and (failed[0] in before or failed[0].startswith("(")) else "no"
        was = was if mutant.name in found else ""
        counts["run"] += mutant.name in found
        counts["killed"] += bool(failed)
        counts["before"] += was == "same"
        name = mutant.name.replace("|", r"\|")
        first, last = f"| `{mutant.file}` | {name} | ", f" | {was} |"
        lines.append(first + killer(found, mutant.name, WIDTH - len(first) - len(last) - 2) + last)
    total = (
        f"{len(MUTANTS)} faults, of which {counts['run']} were run: {counts['killed']} are found, {counts['before']} "
        "were found before.\n"
    )
    return "\n".join([HEAD, total, *lines]) + "\n"


def main() -> None:
    """Read the command line and write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.report", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--before", type=Path, help="the .durations.json of a run of the suite before")
    options = parser.parse_args()
    before = set(json.loads(options.before.read_text())["cases"]) if options.before else set()
    PAGE.write_text(page(options.files, before), encoding="utf-8")


if __name__ == "__main__":
    main()
