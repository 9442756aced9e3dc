"""No stock class alarms: `hf-dist check` of every class of the other sweeps, in a layout that is right, fp32 and bf16.

    python -m tests.sweep checks [--layout zero3|pp|tp|cp] [--only PATTERN] [--every N] [--seconds N] [--results FILE] [--write]

The check is the user's: a checkpoint of a tiny copy, made-up rows, five processes' worth of runs. Equal is right; DIFFERS is a
false alarm (the layouts are those which the other sweeps found equal); refused is an error by name, as a user would read it.
`--results` keeps the rows between calls, `--write` replaces CHECKS.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from hf_dist.errors import HfDistError
from hf_dist.tools.check import Asked, prepare, prove, quiet
from tests.sweep.arguments import CROSSING, classes, first_running
from tests.sweep.pipeline import short
from tests.tools.proofs import start_fork_server

PAGE = Path(__file__).parent / "CHECKS.md"
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero3": {"zero_optimization": {"stage": 3}},
    "pp": {"pipeline": {"stages": 2}, "zero_optimization": {"stage": 0}},
    "tp": {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 1}},
    "cp": {"sequence_parallel_size": 2, "zero_optimization": {"stage": 3}},
}
SECONDS = 180
Rows = dict[str, list[str]]
"""Class, layout and precision -> task, outcome, detail."""


@quiet()
def examine(task: str, name: str, layout: str, half: bool) -> tuple[str, str]:
    """One check of a class: equal, DIFFERS with what does, refused, or rows: in one process, too, their company counts."""
    built = first_running(task, name)
    if isinstance(built, str):
        return "not built", built
    model = built[1]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model.save_pretrained(folder / "tiny")
        config = {**LAYOUTS[layout], "gradient_accumulation_steps": 2, "bf16": {"enabled": half}}
        (folder / "ds.json").write_text(json.dumps(config), encoding="utf-8")
        asked = Asked(str(folder / "tiny"), folder / "ds.json", world=2, steps=5 if half else 2, seq=12)
        try:
            proof = prove(prepare(asked, folder), asked.world, timeout=SECONDS)
        except HfDistError as error:
            return "refused", short(error)
        except RuntimeError as error:
            last = str(error).strip().splitlines()[-1]
            return ("refused" if "hf_dist.errors" in last else "failed"), last[:300]
        except Exception as error:
            return "failed", short(error)
    off = [row for row in proof.rows if not row.equal]
    wrong = [f"{row.what}: {row.difference:.1e} > {row.allowed:.1e} {row.first or row.layout}" for row in off]
    nearest = max(row.difference / row.allowed for row in proof.rows)
    said = "; ".join(note for note in proof.notes[1:] if "bf16" not in note)
    detail = "; ".join(wrong) if wrong else f"{nearest:.2f} of the limit"
    if wrong and "depends on which rows are in one batch" in said:
        return "rows", f"{detail} {said}".strip()
    return ("DIFFERS" if wrong else "equal"), f"{detail} {said}".strip()


# ---- the page


def section(rows: Rows) -> list[str]:
    """Counts per layout and precision, then every row that is not equal."""
    lines = [
        "| layout | precision | classes | equal | rows | refused | failed | not built | alarms |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    kinds: dict[tuple[str, str], Counter[str]] = {}
    for key, row in rows.items():
        _, layout, precision = key.split()
        kinds.setdefault((layout, precision), Counter())[row[1]] += 1
    for (layout, precision), found in sorted(kinds.items()):
        numbers = " | ".join(str(found[word]) for word in ("equal", "rows", "refused", "failed", "not built"))
        lines.append(f"| {layout} | {precision} | {found.total()} | {numbers} | **{found['DIFFERS']}** |")
    lines += ["", "| class | layout | precision | outcome | what is said |", "|---|---|---|---|---|"]
    for key, row in rows.items():
        if row[1] not in ("equal", "not built"):
            name, layout, precision = key.split()
            lines.append(f"| {name} | {layout} | {precision} | {row[1]} | {row[2].replace('|', ' ')[:140]} |")
    return lines


def page(rows: Rows) -> str:
    """The whole page."""
    import transformers

    head = (
        f"`python -m tests.sweep checks --write`, torch {torch.__version__}, transformers {transformers.__version__}, CPU. "
        "`hf-dist check` of a tiny checkpoint of every class, on two ranks, with made-up rows: a stock class in a right layout "
        "must be equal. Rows: differs, and check says why: in one process, too, the loss depends on which rows are together. "
        "Refused: an error by name. Failed: the model itself raises, in plain transformers as well. Fewer classes: a part of "
        "them (`--every`, `--seconds`)."
    )
    return "\n".join(["# Checks sweep", "", head, "", *section(rows)]) + "\n"


def main(arguments: list[str]) -> None:
    """Run the sweep of one layout, in both precisions."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep checks", description=__doc__)
    parser.add_argument("--layout", choices=LAYOUTS, default="zero3")
    parser.add_argument("--only", default="", help="regular expression on the class name")
    parser.add_argument("--every", type=int, default=1, help="a sample: each so many-th class")
    parser.add_argument("--precision", choices=("fp32", "bf16", "both"), default="both")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no class after this many")
    parser.add_argument("--results", type=Path, help="JSON file with rows of earlier calls, which is added to")
    parser.add_argument("--write", action="store_true", help=f"replace {PAGE.name}")
    options = parser.parse_args(arguments)
    import transformers

    transformers.logging.set_verbosity_error()
    rows: Rows = {}
    if options.results and options.results.exists():
        rows = json.loads(options.results.read_text(encoding="utf-8"))
    start_fork_server()
    begun = time.monotonic()
    precisions = ("fp32", "bf16") if options.precision == "both" else (options.precision,)
    wanted = [(task, name) for task, name in classes() if re.search(options.only, name)][:: options.every]
    for (task, name), precision in itertools.product(wanted, precisions):
        key = f"{name} {options.layout} {precision}"
        if key in rows or name.endswith(CROSSING):
            continue
        if time.monotonic() - begun > options.seconds:
            print("time is over: call again with the same --results")
            break
        rows[key] = [task, *examine(task, name, options.layout, precision == "bf16")]
        if options.results:
            options.results.write_text(json.dumps(rows, indent=0), encoding="utf-8")
        print(f"{rows[key][1]:10} {task:15} {key:55} {rows[key][2][:200]}", flush=True)
    if options.write:
        PAGE.write_text(page(rows), encoding="utf-8")
    else:
        print("\n".join(section(rows)[:6]))
