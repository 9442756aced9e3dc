"""One run of one contender: new processes, their environment, and their results or the first error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from hf_dist.dist.host_info import processors
from hf_dist.dist.patience import Patience
from hf_dist.dist.ports import HeldPort
from hf_dist.tools.bench.rank import result_file
from hf_dist.tools.bench.work import Contender, Work, write_work

__all__ = ["TIMEOUT", "RunFailedError", "run"]

TIMEOUT = 1800.0
"""Seconds for one run."""
_SHOWN = 3000
"""Characters of a failed rank's output that are kept."""


class RunFailedError(Exception):
    """A rank ended with an error; the message is the end of its output."""


def run(work: Work, contender: Contender) -> list[dict[str, object]]:
    """The measurements of each rank, by rank. Raises `RunFailedError`. Leaves no process behind."""
    folder = Path(work.folder)
    spec = folder / "run.json"
    write_work(work, contender, spec)
    for rank in range(work.ranks):
        result_file(work.folder, rank).unlink(missing_ok=True)
    logs = [folder / f"rank_{rank}.log" for rank in range(work.ranks)]
    command = [contender.python or sys.executable, "-m", "hf_dist.tools.bench.rank", str(spec)]
    children: list[subprocess.Popen[bytes]] = []
    port = HeldPort()
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as out:
                environment = _environment(work, rank, port.number)
                children.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
        failed = _wait(children)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
        port.release()
    if failed is not None:
        raise RunFailedError(logs[failed].read_text(encoding="utf-8", errors="replace")[-_SHOWN:])
    return [json.loads(result_file(work.folder, rank).read_text(encoding="utf-8")) for rank in range(work.ranks)]


def _wait(children: list[subprocess.Popen[bytes]]) -> int | None:
    """The rank that failed first, or None if all succeeded. A rank that hangs counts as failed."""
    patience = Patience(TIMEOUT)
    while not patience.is_over():
        codes = [child.poll() for child in children]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            return failed[0]
        if None not in codes:
            return None
        time.sleep(0.1)
    return next(rank for rank, child in enumerate(children) if child.poll() is None)


def _environment(work: Work, rank: int, port: int) -> dict[str, str]:
    package = str(Path(__file__).resolve().parents[3])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        **{
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(work.ranks),
            "LOCAL_WORLD_SIZE": str(work.ranks),
        },
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": os.pathsep.join(paths)},
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, processors() // work.ranks)),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DIST_BENCH_BORN": repr(time.time()),
    }
    if work.device == "cpu":
        environment |= {"ACCELERATE_USE_CPU": "true", "DS_ACCELERATOR": "cpu"}
        if sys.platform == "linux":
            environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment
