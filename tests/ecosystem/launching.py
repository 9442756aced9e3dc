"""Ranks of a script, mostly two, under the real launchers, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hf_dist.dist.ports import HeldPort
from tests import forked, processes
from tests.harness import ROOT

LAUNCHERS: dict[str, list[str]] = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node", "{ranks}", "--master_port", "{port}"],
    "accelerate": [
        *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "{port}"),
    ],
    "hf-dist": [
        *("-m", "hf_dist.tools.cli", "launch", "--config_file", "{trl}/zero3.yaml", "--num_processes", "2"),
        *("--mixed_precision", "no", "--main_process_port", "{port}"),
    ],
}


def launch(
    launcher: str, words: Sequence[str], folder: Path, timeout: float = 250, is_real: bool = True, ranks: int = 2
) -> str:
    """What the ranks printed; the test fails with the end of their errors when the launcher does.

    `is_real`: not forked. `ranks`: of torchrun; the others start two.
    """
    return launched(launcher, words, folder, timeout, is_real, ranks=ranks).stdout


def launched(
    launcher: str,
    words: Sequence[str],
    folder: Path,
    timeout: float = 250,
    is_real: bool = True,
    fails: bool = False,
    ranks: int = 2,
) -> subprocess.CompletedProcess[str]:
    """`launch` with both streams. `fails`: the launcher has to, else the test does."""
    port = HeldPort()
    trl = find_spec("trl")
    configs = Path(str(trl.origin)).parent / "accelerate_configs" if trl is not None else ""
    own = (word.format(port=port.number, trl=configs, ranks=ranks) for word in LAUNCHERS[launcher])
    command = [sys.executable, *own, *words]
    path = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {
        **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "datasets"),
    }  # fmt: skip
    with port:
        if is_real:
            done = processes.run(command, cwd=folder, env=env, timeout=timeout)
        else:
            done = forked.run(command, cwd=folder, env=env, apart=True, timeout=timeout)
    assert (done.returncode != 0) == fails, done.stderr[-12000:]
    return done
