"""One step under compute-sanitizer: races in shared memory, accesses out of bounds, leaks. Without the tool it says so.

python -m tests.gpu.sanitizer
"""

from __future__ import annotations

import shutil
import subprocess
import sys

from tests import processes
from tests.gpu.place import GPUS
from tests.gpu.results import record

TOOLS = {"racecheck": (), "memcheck": ("--leak-check", "full")}
PROGRAM = """
import torch, hf_dist
from tests.gpu.place import DEVICE
from tests.parity.families import make_batches, make_model
engine = hf_dist.initialize(make_model("llama"), device=DEVICE, config={
    "train_micro_batch_size_per_gpu": 6, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW"}})
batch = {k: v[:6].to(DEVICE) for k, v in make_batches("llama", 1)[0].items()}
engine.backward(engine(**batch).loss)
engine.step()
"""
SECONDS = 150


def main() -> int:
    """0 if every tool that is there finds nothing."""
    command = shutil.which("compute-sanitizer")
    if command is None or not GPUS:
        print("NOT RUN: " + ("no GPU" if not GPUS else "compute-sanitizer is not on PATH (a part of the CUDA toolkit)"))
        return 0
    failed = 0
    for tool, more in TOOLS.items():
        asked = [command, "--tool", tool, *more, "--error-exitcode", "9", sys.executable, "-c", PROGRAM]
        try:
            done = processes.run(asked, timeout=SECONDS)
            said = next((line for line in reversed(done.stdout.splitlines()) if "SUMMARY" in line), "no summary")
            failed |= done.returncode == 9
        except subprocess.TimeoutExpired:
            said = f"not done in {SECONDS} s"
        print(f"{tool}: {said}")
        record("sanitizer", {"tool": tool, "said": said})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
