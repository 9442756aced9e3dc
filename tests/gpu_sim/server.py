"""Runs functions in processes whose torch has a simulated GPU: `simulate("module:function", ...)`.

A process of its own loads the library before torch, then every job is a fork of it, so that neither tests nor jobs meet what
another one has replaced. What a job returns comes back as a pickle.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from hf_dist.dist.patience import Patience
from tests.gpu_sim import library

PATIENCE_SECONDS = 240.0
"""Seconds for a job."""
_LOADED = (
    "torch", "transformers.models.llama.modeling_llama", "torch.utils.flop_counter", "hf_dist.engine.build",
    "hf_dist.engine.pipeline_runner", "tests.gpu_sim.rank",
)  # fmt: skip


class SimulationError(RuntimeError):
    """A job raised; the text is its traceback."""


@functools.cache
def _server() -> tuple[Any, Any]:
    """Where requests are written to and answers come from."""
    (asked, ask), (answers, answer) = os.pipe(), os.pipe()
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tests.gpu_sim.server", str(asked), str(answer)]
    process = subprocess.Popen(
        command, pass_fds=(asked, answer), cwd=root, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    )
    os.close(asked)
    os.close(answer)
    requests = os.fdopen(ask, "wb")

    def end() -> None:
        with contextlib.suppress(OSError):
            requests.close()
        process.wait(30)

    atexit.register(end)
    return requests, os.fdopen(answers, "rb")


def simulate(function: str, *args: Any, ranks: tuple[int, ...] = (0,)) -> list[Any]:
    """What `module:function(rank, meet, *args)` returned, for each of `ranks`, each in a process of its own.

    `meet`: a folder for `simulated_rank`. Raises `SimulationError` with the traceback of the first that failed.
    """
    requests, answers = _server()
    with tempfile.TemporaryDirectory() as folder:
        pickle.dump((function, args, ranks, str(Path(folder, "meet"))), requests)
        requests.flush()
        outcomes = pickle.load(answers)
    failed = [value for good, value in outcomes if not good]
    if failed:  # who waits for a rank that has failed is not the cause
        raise SimulationError(min(failed, key=lambda text: "TimeoutError" in text))
    return [value for _, value in outcomes]


# ---- in the other process


def _serve(requests: Any, answers: Any) -> None:
    while True:
        try:
            function, args, ranks, meet = pickle.load(requests)
        except EOFError:
            return
        jobs = [_Fork(function, args, rank, meet) for rank in ranks]
        patience = Patience(PATIENCE_SECONDS)
        pickle.dump([job.outcome(patience) for job in jobs], answers)
        answers.flush()


class _Fork:
    def __init__(self, function: str, args: Any, rank: int, meet: str) -> None:
        self._file = f"{meet}.{rank}.pickle"
        self._pid = os.fork()
        if self._pid == 0:
            self._run(function, args, rank, meet)

    def _run(self, function: str, args: Any, rank: int, meet: str) -> NoReturn:
        try:
            module, _, name = function.partition(":")
            outcome = True, getattr(importlib.import_module(module), name)(rank, meet, *args)
        except BaseException:
            outcome = False, traceback.format_exc()
        with contextlib.suppress(BaseException), open(self._file, "wb") as out:
            pickle.dump(outcome, out)
        os._exit(0)  # what a job has replaced is not put back

    def outcome(self, patience: Patience) -> tuple[bool, Any]:
        """(True, what it returned) or (False, why not)."""
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0):
            if patience.is_over():
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                return False, f"no answer within {PATIENCE_SECONDS:.0f} s"
            time.sleep(0.01)
        try:
            with open(self._file, "rb") as given:
                return pickle.load(given)  # type: ignore[no-any-return]
        except (OSError, EOFError):
            return False, "the process of the job has died"


def _main() -> None:
    library.load()
    import torch

    torch.set_num_threads(1)
    for name in _LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _serve(os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "wb"))


if __name__ == "__main__":
    _main()
