"""torchrun in small: starts ranks of a worker from a fork server, ends the others when one fails, returns the output.

The processes see what torchrun's see (variables, uncaught exceptions through `sys.excepthook`, SIGTERM after a failure), but
start in a fraction of a second because torch and transformers are loaded already.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing as mp
import os
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from hf_dist.dist.patience import Patience
from hf_dist.dist.ports import HeldPort
from tests.harness import PRELOAD

GRACE = 5
"""Seconds between SIGTERM and SIGKILL; 30 in torchrun."""


def launch(
    case: str,
    folder: Path,
    world: int = 2,
    timeout: float = 60,
    worker: str = "tests.workers.failing",
    sends_sigterm: bool = True,
) -> tuple[list[int | None], str, float]:
    """Exit codes by rank, what all ranks printed, seconds (of `Patience`).

    A rank that outlives `timeout` writes its stacks to its log, is killed, and has code None.

    `worker`: the module whose `CASES[case](folder)` every rank runs. `sends_sigterm`: to the other ranks when one has failed;
    False: nothing is done to them, as by srun.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    patience = Patience(timeout)
    logs = [folder / f"rank_{rank}.log" for rank in range(world)]
    children = []
    with HeldPort() as port:
        for rank in range(world):
            place = (rank, world, port.number)
            child = context.Process(target=_child, args=(worker, case, str(folder), *place, str(logs[rank])))
            child.start()
            children.append(child)
        hung = _watch(children, patience, sends_sigterm)
    codes = [None if rank in hung else child.exitcode for rank, child in enumerate(children)]
    return codes, "".join(log.read_text() for log in logs), patience.spent


def _watch(children: list[BaseProcess], patience: Patience, sends_sigterm: bool) -> set[int]:
    """Wait for all, as torchrun's agent does; the ranks that had to be killed at the deadline."""
    grace: Patience | None = None
    while any(child.is_alive() for child in children):
        if sends_sigterm and any(child.exitcode not in (None, 0) for child in children):
            grace = grace or Patience(GRACE)
            for child in children:
                child.terminate()
                if grace.is_over():
                    child.kill()
        if patience.is_over():
            hung = {rank for rank, child in enumerate(children) if child.is_alive()}
            for rank in hung:
                os.kill(children[rank].pid or 0, signal.SIGUSR2)
            time.sleep(0.5)
            for rank in hung:
                children[rank].kill()
                children[rank].join()
            return hung
        time.sleep(0.1)
    return set()


def _child(worker: str, case: str, folder: str, rank: int, world: int, port: int, log: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    cases = importlib.import_module(worker).CASES
    code = 0
    try:
        cases[case](folder)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
