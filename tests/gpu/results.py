"""Figures of a run on GPUs, collected and written down: date, command, versions, machine, what passed, what could not run.

python -m tests.gpu.results FOLDER        after the tests, with HF_DIST_GPU_RESULTS=FOLDER while they ran
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests import processes

VARIABLE = "HF_DIST_GPU_RESULTS"
RESULTS = Path(__file__).with_name("RESULTS.md")
PACKAGES = ("torch", "transformers", "accelerate", "hf-dist")


def record(kind: str, row: dict[str, Any]) -> None:
    """One line for the file of that kind; nothing where nobody collects."""
    folder = os.environ.get(VARIABLE)
    if folder:
        with (Path(folder) / f"{kind}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def rows_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    """What was recorded."""
    path = folder / f"{kind}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def outcomes(folder: Path) -> tuple[Counter[str], Counter[str], list[str]]:
    """(tests by outcome, skipped ones by reason, names of failed ones) of all pytest reports in a folder."""
    counts, reasons, failed = Counter[str](), Counter[str](), []
    for report in sorted(folder.glob("*.xml")):
        for case in ElementTree.parse(report).iter("testcase"):
            bad = [case.find(kind) for kind in ("failure", "error")]
            skipped = case.find("skipped")
            if any(found is not None for found in bad):
                counts["failed"] += 1
                failed.append(f"{case.get('classname', '')}::{case.get('name')}")
            elif skipped is not None:
                counts["not run"] += 1
                reasons[skipped.get("message", "")] += 1
            else:
                counts["passed"] += 1
    return counts, reasons, failed


def machine() -> list[str]:
    """Versions, GPUs, driver, commit."""
    import torch

    found = [", ".join(f"{package} {version(package)}" for package in PACKAGES)]
    if torch.cuda.is_available():
        names = Counter(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        gpus = ", ".join(f"{count} x {name}" for name, count in names.items())
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0")
        found.append(f"{gpus}; CUDA {torch.version.cuda}, NCCL {nccl}, driver {driver or 'unknown'}")
    else:
        found.append("no GPU: a rehearsal")
    commit = _said("git", "-C", str(RESULTS.parent), "rev-parse", "--short", "HEAD")
    return [*found, f"commit {commit}"] if commit else found


def _said(*command: str) -> str:
    try:
        return processes.run(command, timeout=30).stdout.strip()
    except OSError:
        return ""


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Of Markdown; all columns but the first to the right."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in rows]


def section(folder: Path, command: str) -> str:
    """The run in `folder`."""
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    counts, reasons, failed = outcomes(folder)
    lines = [f"## {now}: `{command}`", "", *(f"* {line}" for line in machine())]
    lines.append("* tests: " + (", ".join(f"{n} {what}" for what, n in sorted(counts.items())) or "none"))
    lines += [f"* not run ({n}): {reason}" for reason, n in sorted(reasons.items())]
    lines += [f"* failed: `{name}`" for name in failed]
    lines += [f"* not run (no time left): {row['what']}" for row in rows_of(folder, "late")]
    memory = rows_of(folder, "memory")
    if memory:
        lines += ["", "Peak of a step, planned and as the allocator counts it:", ""]
        lines += table(
            ("case", "planned, GB", "measured, GB", "ratio"),
            [
                (
                    r["case"],
                    f"{r['planned'] / 1e9:.2f}",
                    f"{r['measured'] / 1e9:.2f}",
                    f"{r['planned'] / r['measured']:.3f}",
                )
                for r in memory
            ],
        )
    overhead = rows_of(folder, "overhead")
    if overhead:
        lines += ["", "What a rank takes of its GPU beside tensors (context, cuBLAS, communicators):", ""]
        lines += table(("ranks", "GB"), [(r["ranks"], f"{r['nbytes'] / 1e9:.2f}") for r in overhead])
    bench = rows_of(folder, "bench")
    if bench:
        lines += ["", "Llama, stage 3 and FSDP2 on one GPU, medians of the rounds:", ""]
        lines += table(
            ("", "hf_dist", "FSDP2", "ratio"),
            [(r["what"], f"{r['ours']:.4g}", f"{r['theirs']:.4g}", f"{r['ours'] / r['theirs']:.3f}") for r in bench],
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Put the run before those that are there."""
    folder, command = Path(sys.argv[1]), " ".join(sys.argv[2:]) or "bash tests/run_gpu.sh"
    head, _, earlier = RESULTS.read_text(encoding="utf-8").partition("\n## ")
    text = section(folder, command)
    print(text)
    RESULTS.write_text(f"{head.rstrip()}\n\n{text}" + (f"\n## {earlier}" if earlier else ""), encoding="utf-8")


if __name__ == "__main__":
    main()
