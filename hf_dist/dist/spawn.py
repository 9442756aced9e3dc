"""Runs a function on several ranks of this machine (gloo, CPU), for `hf-dist check`, `hf-dist doctor` and the tests.

A fork server that has loaded the heavy modules starts the processes, so that a rank starts in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from hf_dist.dist.host_info import schedule_as_batch
from hf_dist.dist.patience import Patience
from hf_dist.dist.ports import HeldPort

__all__ = ["FOLDER", "run_ranks"]

FOLDER = "HF_DIST_RANKS_FOLDER"
"""Names, in each rank, a folder that they share and that is removed when all have ended."""

_ASK = getattr(signal, "SIGUSR2", 0)
"""Asks a rank where it is. SIGUSR1 asks a job for a checkpoint."""
_LOOK_SECONDS = 1.0
"""Between two looks at how long the ranks have had."""


def run_ranks(
    fn: Callable[..., object],
    world: int,
    args: Iterable[object] = (),
    timeout: float = 300,
    preload: Iterable[str] = ("torch", "transformers", "torch.distributed"),
) -> list[Any]:
    """The results of `fn(rank, world, *args)`, by rank. Raises RuntimeError with the traceback of the first failing rank.

    `fn` must be in an importable module; its arguments and result are pickled. If a rank fails, the others are stopped at
    once; if some do not end within `timeout` seconds (more on a busy machine: `Patience`), the error shows where every
    thread of each of them is. `preload`: modules that the fork server imports; only the first call's value counts.
    """
    forks = "forkserver" in mp.get_all_start_methods()
    context: Any = mp.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(list(preload))
    pipes: list[Connection] = []
    children = []
    folders = tempfile.TemporaryDirectory(prefix="hf_dist-ranks-", ignore_cleanup_errors=True)
    with folders as folder, HeldPort() as port:
        stacks = [str(Path(folder, str(rank))) for rank in range(world)]
        for rank in range(world):
            here, there = context.Pipe(duplex=False)
            job = (fn.__module__, fn.__qualname__, rank, world, port.number, tuple(args), there)
            child = context.Process(target=_child, args=(job, list(sys.path), stacks[rank]), daemon=True)
            child.start()
            there.close()
            pipes.append(here)
            children.append(child)
        try:
            return _collect(pipes, Patience(timeout))
        except TimeoutError as late:
            where = "".join(f"\n{_stack(children[rank].pid, rank, stacks[rank])}" for rank in late.args[0])
            raise RuntimeError(f"ranks {late.args[0]} did not finish within {timeout:.0f} s{where}") from None
        finally:
            for child in children:
                child.join(1 if child.is_alive() else 5)
                if child.is_alive():
                    child.kill()


def _stack(pid: int | None, rank: int, file: str) -> str:
    """Where a rank's threads are; `_child` writes it when it is asked."""
    with contextlib.suppress(OSError, TypeError):
        os.kill(pid, _ASK)  # type: ignore[arg-type]
        time.sleep(0.3)
        return "\n".join(f"[rank {rank}] {line}" for line in Path(file).read_text().splitlines())
    return f"[rank {rank}] does not answer"


def _collect(pipes: list[Connection], patience: Patience) -> list[object]:
    results: dict[int, object] = {}
    while len(results) < len(pipes):
        open_pipes = [p for rank, p in enumerate(pipes) if rank not in results]
        for pipe in wait(open_pipes, timeout=_LOOK_SECONDS):
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                kind, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                kind, value = "error", f"[rank {rank}] ended without a result"
            if kind == "error":
                raise RuntimeError(value)
            results[rank] = value
        if len(results) < len(pipes) and patience.is_over():
            raise TimeoutError(sorted(set(range(len(pipes))) - set(results)))
    return [results[rank] for rank in range(len(pipes))]


def _end_with_parent() -> None:
    """Exit when the parent dies: otherwise the fork server would keep its ranks running."""
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _child(job: tuple[str, str, int, int, int, tuple[object, ...], Connection], path: list[str], stack: str) -> None:
    module, name, rank, world, port, args, pipe = job
    told = open(stack, "w")  # noqa: SIM115  # as long as the process
    if _ASK:
        faulthandler.register(_ASK, told)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true",
        **{FOLDER: str(Path(stack).parent)},
    )  # fmt: skip
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.path[:] = path
    schedule_as_batch()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    try:
        fn: Any = importlib.import_module(module)
        for part in name.split("."):
            fn = getattr(fn, part)
        # Plain pickle: multiprocessing would pass tensors as handles to this process, which is about to end.
        pipe.send_bytes(pickle.dumps(("result", fn(rank, world, *args))))
    except BaseException:
        lines = traceback.format_exc().rstrip().splitlines()
        pipe.send_bytes(pickle.dumps(("error", "\n" + "\n".join(f"[rank {rank}] {line}" for line in lines))))
        os._exit(1)
    # Spawned gloo children sometimes abort at interpreter exit; nothing is left to clean up here.
    from hf_dist.dist.mesh import leave_job

    with contextlib.suppress(RuntimeError):  # a peer failed; its traceback is reported instead
        leave_job()
    sys.stdout.flush()
    os._exit(0)
