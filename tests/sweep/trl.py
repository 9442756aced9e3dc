"""Which trainers of the installed TRL train as under DDP: all that its packages have, experimental ones too, on two ranks.

    python -m tests.sweep trl [--only PATTERN] [--write]

Three steps each at stages 1 and 3, full and with LoRA: losses, gradient norms, every other number of the log that is no time,
every weight, and what a server would be sent, within 1e-5 of plain DDP on the same two ranks. `--write` replaces TRL.md.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.ecosystem.tiny import save_models
from tests.ecosystem.trl_trainers import ALIASES, RECIPES, difference_of, save_teacher, trainers
from tests.harness import run_ranks
from tests.hf.on_ranks import run_jobs
from tests.sharding.loop import TOLERANCE

TABLE = Path(__file__).parent / "TRL.md"
SECONDS = 120
"""Longest wait for the three runs of one trainer."""
KINDS = (("full", False), ("LoRA", True))
STAGES = (1, 3)
ORDER = ("equal", "refused", "not trained by DDP", "failed", "WRONG")
Outcome = tuple[str, str]


def examine(name: str, adapters: bool, root: Path) -> list[Outcome]:
    """Of each stage, of both ranks the worse one."""
    if name not in RECIPES:
        return [("failed", "no recipe in tests/ecosystem/trl_trainers.py")] * len(STAGES)
    runs = [{"name": name, "stage": stage, "adapters": adapters, "root": str(root)} for stage in (None, *STAGES)]
    folder = tempfile.mkdtemp(dir=root)
    try:
        ranks = run_ranks(
            run_jobs, 2, ([("tests.ecosystem.trl_trainers:run", run) for run in runs], folder), timeout=SECONDS
        )
    except RuntimeError as error:
        return [("failed", str(error).splitlines()[-1])] * len(STAGES)
    pairs = [[compared(outcome, expected) for outcome in outcomes] for expected, *outcomes in ranks]
    return [max(of_stage, key=lambda outcome: ORDER.index(outcome[0])) for of_stage in zip(*pairs, strict=True)]


def compared(outcome: Any, expected: Any) -> Outcome:
    """`equal` with the worst relative difference, or what happened instead. A string is a traceback."""
    if isinstance(expected, str):
        return "not trained by DDP", expected.strip().splitlines()[-1][:200]
    if isinstance(outcome, str):
        text = outcome.strip().splitlines()[-1]
        return "refused" if text.startswith("hf_dist.errors.") else "failed", text.removeprefix("hf_dist.errors.")[:200]
    worst, where = difference_of(outcome, expected)
    return ("equal", f"{worst:.0e}") if worst <= TOLERANCE else ("WRONG", f"{where} off by {worst:.1e}, relative")


def sweep(pattern: str) -> dict[str, list[Outcome]]:
    """Outcomes by trainer, in the order of `KINDS` and `STAGES`."""
    rows: dict[str, list[Outcome]] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_models(Path(folder))
        save_teacher(Path(folder))
        for name in trainers():
            if name in ALIASES or not re.search(pattern, name):
                continue
            rows[name] = [outcome for _, adapters in KINDS for outcome in examine(name, adapters, Path(folder))]
            print(f"{name:45} {'  '.join(map(' '.join, rows[name]))}", flush=True)
    return rows


def table(rows: dict[str, list[Outcome]]) -> str:
    """The Markdown page."""
    import transformers
    import trl

    counts = Counter(outcome for row in rows.values() for outcome, _ in row)
    lines = [
        "# TRL sweep",
        "",
        f"`python -m tests.sweep trl --write`, torch {torch.__version__}, transformers {transformers.__version__}, trl "
        f"{trl.__version__}, CPU, fp32, two ranks. Every trainer of `trl` and `trl.experimental`, three steps. The number is "
        "the worst relative difference from plain DDP of losses, gradient norms, TRL's own metrics, every weight, and the "
        "weights that a server would get. Servers and the kernels of GPUs are stand-ins (`tests/ecosystem/trl_servers.py`).",
        "",
        f"{len(rows)} trainers, {sum(counts.values())} runs: "
        + ", ".join(f"{counts[outcome]} {outcome}" for outcome in ORDER)
        + ".",
        "",
        f"| trainer | {' | '.join(f'{kind}, stage {stage}' for kind, _ in KINDS for stage in STAGES)} |",
        f"|---|{'--:|' * len(KINDS) * len(STAGES)}",
    ]
    notes: list[str] = []
    for name, row in rows.items():
        cells = []
        for outcome, text in row:
            if outcome != "equal" and text not in notes:
                notes.append(text)
            cells.append(text if outcome == "equal" else f"{outcome} [{notes.index(text) + 1}]")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [f"| {name} | {' | '.join([f'`{ALIASES[name]}`'] * 4)} |" for name in trainers() if name in ALIASES]
    lines += ["", *(f"{i}. `{text}`" for i, text in enumerate(notes, 1))]
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: list[str]) -> None:
    """Run the sweep and print the summary."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.sweep trl", description="Which of TRL's trainers train alike"
    )
    parser.add_argument("--only", default="", help="regular expression on the trainer's name")
    parser.add_argument("--write", action="store_true", help=f"replace {TABLE.name}")
    options = parser.parse_args(arguments)
    text = table(sweep(options.only))
    print(text.splitlines()[4])
    if options.write:
        TABLE.write_text(text, encoding="utf-8")
