"""The Trainer without a launcher: `python script.py` takes the GPU there is, trains, evaluates, saves and goes on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked, processes
from tests.gpu.place import DEVICE, GPUS, rehearsed
from tests.harness import ROOT

BF16 = {"bf16": {"enabled": True}}
CONFIGS: dict[str, dict[str, Any]] = {
    "stage 3": {"zero_optimization": {"stage": 3}},
    "stage 3 in bf16": {"zero_optimization": {"stage": 3}, **BF16},
    "stage 0 in bf16": {"zero_optimization": {"stage": 0}, **BF16},
    "optimizer on the host": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}, **BF16,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", rehearsed(list(CONFIGS)))
def test_a_script_started_by_python_trains_on_the_gpu_and_resumes(name: str, tmp_path: Path) -> None:
    command = [sys.executable, f"{ROOT}/tests/gpu/plain_script.py", str(tmp_path), json.dumps(CONFIGS[name])]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment["PYTHONPATH"] = ROOT
    if GPUS:  # forked from a server, CUDA could not be started
        environment.pop("ACCELERATE_USE_CPU", None)
        done = processes.run(command, env=environment, timeout=300)
    else:
        done = forked.run(command, env=environment | {"ACCELERATE_USE_CPU": "true"}, apart=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith('{"device"')))
    assert said["device"] == str(DEVICE)
    assert len(said["losses"]) == 8 and said["losses"][-1] < said["losses"][0]
    assert said["again"] == pytest.approx(said["losses"][4:], rel=1e-3 if "bf16" in CONFIGS[name] else 1e-5)
    assert "Traceback" not in done.stderr
