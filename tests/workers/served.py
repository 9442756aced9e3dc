"""Three replicas that meet a server of two ranks, and what goes wrong in one of the roles. Each leaves what `train` returns."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_dist.dist.link import Link
from hf_dist.dist.patience import Patience
from tests.parallel.local_sgd.emulation import Work

WORK = Work(replicas=3, every=2, steps=8, outer_lr=0.7, momentum=0.9, nesterov=True)
SERVERS = 2
Act = Callable[[Path, int, int], None]


def _train(act: Act, folder: str) -> None:
    from tests.parallel.local_sgd.served_jobs import Served, train

    rank, place = int(os.environ["RANK"]), Path(folder)
    (place / f"pid{rank}").write_text(str(os.getpid()))
    served = Served(WORK, servers=SERVERS)
    found = train(rank, served.world, served, functools.partial(act, place))
    torch.save(found, place / f"found{rank}.tmp")
    os.replace(place / f"found{rank}.tmp", place / f"found{rank}")


def _pid(folder: Path, rank: int) -> int:
    return int((folder / f"pid{rank}").read_text())


def _wait_for(ready: Callable[[], bool]) -> None:
    patience = Patience(60)
    while not ready():
        assert not patience.is_over(), "nothing to wait for"
        time.sleep(0.02)


def _nothing(folder: Path, replica: int, step: int) -> None:
    pass


def _is_killed(folder: Path, replica: int, step: int) -> None:
    """Between two meetings; the others make their fourth step only then."""
    if replica == 2 and step == 4:
        (folder / "lost").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if replica != 2 and step == 4:
        _wait_for((folder / "lost").exists)


def _dies_while_it_pushes(folder: Path, replica: int, step: int) -> None:
    """One rank of the server has its second push, the other has not."""
    if replica == 2 and step == 4:
        send = Link.send

        def sends(self: Link, header: Any, tensors: Any = ()) -> None:
            if header["call"] == "push" and self._peer == "server rank 1":
                (folder / "lost").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            send(self, header, tensors)

        Link.send = sends  # type: ignore[method-assign]
    if replica != 2 and step == 4:
        _wait_for((folder / "lost").exists)


def _is_stopped(folder: Path, replica: int, step: int) -> None:
    """The others go on to their end without it; it is killed then, as the scheduler would."""
    if replica == 2 and step == 4:
        (folder / "lost").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    if replica != 2 and step == 4:
        _wait_for((folder / "lost").exists)


def _is_late(folder: Path, replica: int, step: int) -> None:
    """It joins once another has made six steps."""
    if replica == 0 and step == 7:
        (folder / "ahead").touch()
    if replica == 2 and step == 1:
        _wait_for((folder / "ahead").exists)


def _kills_the_server(folder: Path, replica: int, step: int) -> None:
    if replica == 0 and step == 3:
        os.kill(_pid(folder, 0), signal.SIGKILL)


def _stopped(folder: str) -> None:
    """And one of the others kills the stopped one at last."""
    rank, place = int(os.environ["RANK"]), Path(folder)  # of the start
    _train(_is_stopped, folder)
    if rank == SERVERS:
        _wait_for((place / f"found{SERVERS + 1}").exists)
        os.kill(_pid(place, SERVERS + 2), signal.SIGKILL)


CASES: dict[str, Callable[[str], None]] = {
    "nothing_wrong": functools.partial(_train, _nothing),
    "killed": functools.partial(_train, _is_killed),
    "while_it_pushes": functools.partial(_train, _dies_while_it_pushes),
    "stopped": _stopped,
    "late": functools.partial(_train, _is_late),
    "server_killed": functools.partial(_train, _kills_the_server),
}
