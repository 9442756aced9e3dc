"""How the tests start an example: as its user does, offline, on two processes of one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests import forked, processes
from tests.covering import FULL_GRID

REPO = Path(__file__).resolve().parent.parent.parent
TIMEOUT_S = 400


def run(*command: str, is_real: bool = False, **variables: str) -> str:
    """Run a Python command from the repository, offline and with one thread; its output, or a failure that shows it.

    `is_real`: in new interpreters, as a user does.
    """
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")])),
        **variables,
    }
    if is_real:
        done = processes.run(
            [sys.executable, *command],
            cwd=REPO,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
        )
    else:
        done = forked.run([sys.executable, *command], cwd=REPO, env=environment, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"exit code {done.returncode} of {' '.join(command)}\n{done.stdout[-8000:]}"
    return done.stdout


def config_of(name: str, output: Path) -> str:
    """The shipped config of this name, without bf16: torch's bf16 products take 4 to 90 times those of fp32 on processors
    that have none (`HF_DIST_FULL_GRID=1`: as it is). Other tests train in bf16, with small models."""
    path = Path("configs", name)
    if FULL_GRID:
        return str(path)
    config = json.loads((REPO / path).read_text())
    config["bf16"] = {"enabled": False}
    output.mkdir(exist_ok=True)
    written = output / name
    written.write_text(json.dumps(config))
    return str(written)


def on_few_texts(script: str) -> list[str]:
    """The words that run an example which reads the standard library: on a few packages of it by default."""
    return [script] if FULL_GRID else ["tests/examples/on_few_texts.py", script]


def start(
    script: str, config: str, output: Path, *arguments: str, processes: int = 2
) -> subprocess.CompletedProcess[str]:
    """An example over CPU processes, whatever its end."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    paths = ["--dist_config", config_of(config, output), "--output_dir", str(output), "--use_cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return forked.run(
        [*launcher, f"examples/{script}", *paths, *arguments], cwd=REPO, env=environment, timeout=TIMEOUT_S
    )


def train(script: str, config: str, output: Path, *arguments: str, is_real: bool = False) -> str:
    """Three steps of an example over two CPU processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    paths = ["--dist_config", config_of(config, output), "--output_dir", str(output)]
    return run(*launcher, f"examples/{script}", *paths, "--use_cpu", "--max_steps", "3", *arguments, is_real=is_real)
