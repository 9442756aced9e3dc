"""Figures of a run on GPUs, collected and written down: date, command, versions, machine, what passed, what could not run."""

from __future__ import annotations

import datetime
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from hf_dist.version import __version__
from tests import processes

VARIABLE = "HF_DIST_GPU_RESULTS"
RESULTS = Path(__file__).with_name("RESULTS.md")
PACKAGES = ("torch", "transformers", "accelerate", "peft")


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

    found = [", ".join([*map(_version, PACKAGES), f"hf_dist {__version__}"])]
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


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def _said(*command: str) -> str:
    try:
        return processes.run(command, timeout=30).stdout.strip()
    except OSError:
        return ""


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Of Markdown; all columns but the first to the right."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in rows]


def section(folder: Path, command: str, late: Sequence[str] = ()) -> str:
    """The run in `folder`."""
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    counts, reasons, failed = outcomes(folder)
    lines = [f"## {now}: `{command}`", "", *(f"* {line}" for line in machine())]
    lines.append("* tests: " + (", ".join(f"{n} {what}" for what, n in sorted(counts.items())) or "none"))
    lines += [f"* not run ({n}): {reason}" for reason, n in sorted(reasons.items())]
    lines += [f"* failed: `{name}`" for name in failed]
    lines += [f"* not run (no time left): {name}" for name in late]
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
    for title, kind in (
        ("Speed of a Llama on one GPU", "speed"),
        ("The simulated GPU beside the real one", "simulated"),
    ):
        if rows := rows_of(folder, kind):
            lines += ["", f"{title}:", "", *table(tuple(rows[0]), [tuple(row.values()) for row in rows])]
    return "\n".join(lines) + "\n"


def write(folder: Path, command: str, late: Sequence[str]) -> None:
    """Put the run in `folder` before those that are in RESULTS.md. `late`: what there was no time for."""
    head, _, earlier = RESULTS.read_text(encoding="utf-8").partition("\n## ")
    text = section(folder, command, late)
    RESULTS.write_text(f"{head.rstrip()}\n\n{text}" + (f"\n## {earlier}" if earlier else ""), encoding="utf-8")
