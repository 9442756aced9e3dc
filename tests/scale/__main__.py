"""Tables of steps at scale: `python -m tests.scale [--model 8b 70b] [--world 64 512 4096] [--stage 3] [--write]`.

Per rank: collectives, bytes at rest and at the peak from a run on fake tensors, beside the plan; then host time from a run on
small real tensors. `--write` puts the tables into `hf_dist/sharding/RESULTS.md`.
"""

from __future__ import annotations

import argparse
import datetime
import os
from pathlib import Path
from typing import Any

import torch

from tests.harness import ROOT, run_ranks
from tests.scale.engines import LLAMA_3
from tests.scale.host import host_case, summary
from tests.scale.measure import PLAIN_LOSS, measure_case

RESULTS = Path(ROOT, "hf_dist", "sharding", "RESULTS.md")
BEGIN, END = "<!-- begin: python -m tests.scale --write -->", "<!-- end -->"
ENGINES = {3: ("hf_dist", PLAIN_LOSS, "fsdp2", "fsdp2 ends")}


def check(got: dict[str, Any]) -> None:
    """The formulas are the run, or this is an error."""
    assert got["traffic"] == got["counted"] == got["planned_traffic"], got
    assert got["resident_said"] == got["planned_resident"], got


def _row(model: str, size: int, engine: str, got: dict[str, Any]) -> str:
    def sent(kind: str) -> str:
        count, nbytes = got["traffic"].get(kind, (0, 0))
        return f"{count}, {nbytes / 1e9:.2f}" if nbytes > 1e6 else str(count)

    ours = "planned_peak" in got
    cells = [
        model, str(size), engine, *(sent(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")),
        f"{(got['planned_resident'] if ours else got['resident']) / 1e9:.3f}", f"{got['peak'] / 1e9:.2f}",
        f"{got['planned_peak'] / 1e9:.2f}" if ours else "", f"{got['set_up']:.1f}", f"{1e3 * got['step']:.0f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def scale_table(models: list[str], sizes: list[int], stage: int) -> list[str]:
    """Markdown."""
    lines = [
        "| Llama-3 | ranks | engine | all-gathers, GB | reduce-scatters, GB | all-reduces | at rest GB | peak GB | planned "
        "| set-up s | host ms |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for model in models:
        for size in sizes:
            for engine in ENGINES.get(stage, ("hf_dist",)):
                got = run_ranks(measure_case, 1, (engine, model, size, stage), timeout=1200)[0]
                if engine.startswith("hf_dist"):
                    check(got)
                lines.append(_row(model, size, engine, got))
                print(lines[-1], flush=True)
    return lines


def host_table(models: list[str], stage: int, rounds: int) -> list[str]:
    """Markdown."""
    lines = ["| modules of Llama-3 | torch ms | hf_dist ms | FSDP2 ms | hf_dist / FSDP2 |", "|---|--:|--:|--:|--:|"]
    for model in models:
        found = run_ranks(host_case, 1, (model, stage, rounds), timeout=1200)[0]
        of = summary(found)
        times = [
            f"{of[f'{name} ms']:.0f} (best {1e3 * min(found[name]):.0f})" for name in ("torch", "hf_dist", "fsdp2")
        ]
        lines.append(f"| {model} | {' | '.join(times)} | {of['hf_dist / fsdp2']:.2f} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["8b", "70b"], choices=LLAMA_3)
    parser.add_argument("--world", nargs="+", type=int, default=[64, 512, 4096])
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20, help="of steps for the host's time; 0 for none")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    lines = scale_table(arguments.model, arguments.world, arguments.stage)
    if arguments.rounds:
        lines += ["", *host_table(arguments.model, arguments.stage, arguments.rounds)]
    load = f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after, 2 cores"
    lines += ["", f"{datetime.date.today()}, torch {torch.__version__}, stage {arguments.stage}, {load}."]
    if arguments.write:
        text = RESULTS.read_text(encoding="utf-8")
        start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
        RESULTS.write_text(text[:start] + "\n\n" + "\n".join(lines) + "\n\n" + text[stop:], encoding="utf-8")


if __name__ == "__main__":
    main()
