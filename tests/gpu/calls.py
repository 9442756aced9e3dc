"""The four calls of `bash tests/run_gpu.sh`: what each runs, in which order, in how much time, and what it leaves behind."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
STATE = HERE / ".run"
"""What the calls have done: reports of pytest and figures, by call. Ignored by git, kept between two calls on one machine."""
SECONDS = 480.0
LEAST = 20.0
"""Seconds that are left for another step to begin."""
REHEARSE = "HF_DIST_REHEARSE"
NEEDED = (
    *("torch", "transformers", "accelerate", "safetensors", "numpy", "packaging", "pydantic", "rich", "typer"),
    *("pytest", "hypothesis"),
)
CALLS: dict[str, tuple[str, ...]] = {
    "one": (
        *("test_one_process.py", "test_host_waits.py", "test_delayed.py", "test_trainer.py", "test_settings.py"),
        *("test_memory.py", "test_loss.py", "test_programs.py", "sanitizer"),
    ),
    "ranks": ("test_shared.py", "test_pipeline.py", "test_ranks.py", "test_parity.py"),
    "speed": ("speed",),
    "simulated": ("simulated",),
}
"""Call -> files of tests, and programs of this folder, in order."""


@dataclass(frozen=True)
class Step:
    """What became of one step of a call."""

    name: str
    outcome: str
    """done, failed, cut off, no time, or done before."""
    seconds: float
    code: int = 0


def missing(names: Sequence[str] = NEEDED) -> list[str]:
    """Packages that are not there."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def run_step(name: str, folder: Path, seconds: float, more: Sequence[str]) -> Step:
    """One file or program, unless it was done before. A step that is cut off begins anew in the next call."""
    stamp = folder / f"{name}.done"
    if stamp.exists():
        return Step(name, "done before", 0.0, int(stamp.read_text()))
    if seconds < LEAST:
        return Step(name, "no time", 0.0)
    report = ["--junit-xml", str(folder / f"{name}.xml")]
    tests = ["pytest", f"tests/gpu/{name}", "-q", "-rs", "-p", "no:xdist", "-p", "no:durations", *report, *more]
    command = [sys.executable, "-m", *(tests if name.endswith(".py") else [f"tests.gpu.{name}"])]
    begun = time.monotonic()
    try:
        code = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "HF_DIST_GPU_RESULTS": str(folder)}, timeout=seconds
        ).returncode
    except subprocess.TimeoutExpired:
        return Step(name, "cut off", time.monotonic() - begun, 1)
    code = 0 if code == 5 else code  # no test was chosen
    stamp.write_text(str(code))
    return Step(name, "failed" if code else "done", time.monotonic() - begun, code)


def run_call(name: str, seconds: float, more: Sequence[str]) -> list[Step]:
    """All steps of a call that fit, then its table, its JSON and its section of RESULTS.md."""
    from tests.gpu import results

    folder = STATE / name
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    steps = [run_step(step, folder, end - time.monotonic(), more) for step in CALLS[name]]
    counts, reasons, failed = results.outcomes(folder)
    print(f"\ncall {name}: " + (", ".join(f"{n} {what}" for what, n in sorted(counts.items())) or "no tests"))
    print(
        "\n".join(
            results.table(("step", "outcome", "seconds"), [(s.name, s.outcome, f"{s.seconds:.0f}") for s in steps])
        )
    )
    for reason, number in sorted(reasons.items()):
        print(f"not run ({number}): {reason}")
    for case in failed:
        print(f"failed: {case}")
    out = os.environ.get("OUT")
    if out:
        rows = {path.stem: results.rows_of(folder, path.stem) for path in folder.glob("*.jsonl")}
        found = {
            "machine": results.machine(),
            "steps": [vars(s) for s in steps],
            "tests": counts,
            "failed": failed,
            **rows,
        }
        (Path(out) / f"{name}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    if not os.environ.get(REHEARSE):
        results.write(
            folder, f"bash tests/run_gpu.sh {name}", [s.name for s in steps if s.outcome in ("cut off", "no time")]
        )
    return steps


def main(arguments: Sequence[str]) -> int:
    """0 if nothing failed; 2 if the environment lacks something."""
    parser = argparse.ArgumentParser(prog="bash tests/run_gpu.sh", description=__doc__)
    parser.add_argument("call", nargs="?", choices=(*CALLS, "all"), default="all")
    parser.add_argument("--again", action="store_true", help="forget what earlier calls have done")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a call")
    options, more = parser.parse_known_args(arguments)
    if lacking := missing():
        print(f"missing: {', '.join(lacking)}. Run: pip install {' '.join(lacking)}")
        print(f"Without internet: elsewhere pip download --dest wheels {' '.join(lacking)}, here")
        print(f"pip install --no-index --find-links wheels {' '.join(lacking)}. Nothing was run.")
        return 2
    import torch

    os.environ.pop("ACCELERATE_USE_CPU", None)
    if not torch.cuda.is_available():
        if not os.environ.get(REHEARSE):
            print(
                "no GPU: torch.cuda.is_available() is False. Nothing was run; HF_DIST_REHEARSE=1 runs a rehearsal on the CPU."
            )
            return 0
        print("a rehearsal on the CPU: fewer cases, smaller sizes; figures mean nothing")
    if options.again:
        shutil.rmtree(STATE, ignore_errors=True)
    wanted = list(CALLS) if options.call == "all" else [options.call]
    steps = [step for name in wanted for step in run_call(name, options.seconds, more)]
    return int(any(step.code for step in steps))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
