"""Writes the table of `tests/README.md`: every test file, what it proves, its cases and seconds.

    python -m tests.readme

What a file proves is the first sentence of its docstring; cases and seconds are those of `durations.tsv`.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.durations import TABLE

ROOT = Path(__file__).resolve().parent
PAGE = ROOT / "README.md"
LONGEST = 105
"""Characters of a sentence that are shown: a page has lines of at most 160."""
MARK = "<!-- python -m tests.readme -->\n"


def first_sentence(path: Path) -> str:
    """Of the docstring of a module, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.?!])\s", paragraph)[0].rstrip(".").replace("|", r"\|")
    return sentence if len(sentence) <= LONGEST else sentence[: LONGEST - 1].rpartition(" ")[0] + " …"


def measured() -> dict[str, tuple[int, float]]:
    """Test file -> cases, processor seconds."""
    rows = (line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines()[1:])
    return {file: (int(cases), float(cpu)) for file, cases, cpu, *_ in rows}


def table() -> str:
    """A section per folder, with the command that runs it and its sum."""
    folders: defaultdict[Path, list[Path]] = defaultdict(list)
    for path in sorted(ROOT.rglob("test_*.py")):
        folders[path.parent].append(path)
    known, sections = measured(), []
    for folder, paths in sorted(folders.items()):
        costs = [known.get(path.relative_to(ROOT.parent).as_posix(), (0, 0.0)) for path in paths]
        name = "tests" if folder == ROOT else f"tests/{folder.name}"
        total = f"{sum(cases for cases, _ in costs)} cases, {sum(cpu for _, cpu in costs):.0f} s"
        lines = [f"## {name}: {total}", "", "| file | what it proves | cases | seconds |", "|---|---|--:|--:|"]
        for path, (cases, cpu) in zip(paths, costs, strict=True):
            lines.append(f"| `{path.name}` | {first_sentence(path)} | {cases} | {cpu:.1f} |")
        sections.append("\n".join(lines))
    total = sum(cpu for _, cpu in known.values())
    head = (
        f"Seconds are processor seconds of all processes, {total:.0f} in all. One file: "
        "`bash tests/run.sh -n 0 tests/FOLDER/FILE`.\n"
        "Benchmarks (`bench_*.py`) and sweeps (`python -m tests.sweep`, `python -m tests.scale`) are not part of the run.\n"
        "Which class is equal in a layout: `sweep/*.md`; which of its labels, inputs and outputs: "
        "[sweep/ARGUMENTS.md](sweep/ARGUMENTS.md).\n\n"
    )
    return head + "\n\n".join(sections) + "\n"


def page() -> str:
    """The whole page."""
    return PAGE.read_text(encoding="utf-8").partition(MARK)[0] + MARK + "\n" + table()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
