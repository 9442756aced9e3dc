"""Three replicas that meet a server of two ranks, and what goes wrong in one of the roles. Each leaves what `train` returns."""

from __future__ import annotations

import functools
import json
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


def _gets(number: int, folder: Path, replica: int, step: int) -> None:
    """A signal, between two meetings; the others make their fourth step only then."""
    if replica == 2 and step == 4:
        (folder / "lost").touch()
        os.kill(os.getpid(), number)
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
    """The others go on to their end without it; one of them kills it then, as the scheduler would."""
    rank, place = int(os.environ["RANK"]), Path(folder)  # of the start
    _train(functools.partial(_gets, signal.SIGSTOP), folder)
    if rank == SERVERS:
        _wait_for((place / f"found{SERVERS + 1}").exists)
        os.kill(_pid(place, SERVERS + 2), signal.SIGKILL)


CASES: dict[str, Callable[[str], None]] = {
    "nothing_wrong": functools.partial(_train, _nothing),
    "killed": functools.partial(_train, functools.partial(_gets, signal.SIGKILL)),
    "while_it_pushes": functools.partial(_train, _dies_while_it_pushes),
    "stopped": _stopped,
    "late": functools.partial(_train, _is_late),
    "server_killed": functools.partial(_train, _kills_the_server),
}


def _told(folder: str) -> None:
    """With the Trainer: all processes of the start are told to end, as by a scheduler, before a step that is no meeting."""
    from tests.parallel.local_sgd import served_trainings

    rank, place = int(os.environ["RANK"]), Path(folder)
    (place / f"pid{rank}").write_text(str(os.getpid()))
    step, told = served_trainings.Watched.training_step, []

    def tells(self: Any, *args: Any, **kwargs: Any) -> Any:
        if rank == 1 and self.state.global_step == 3 and not told:
            told.append(True)
            for other in (0, 2, 1):
                os.kill(_pid(place, other), signal.SIGTERM)
        return step(self, *args, **kwargs)

    served_trainings.Watched.training_step = tells  # type: ignore[method-assign]
    served_trainings.train(rank, 3, folder, 2, {}, save_steps=100, max_steps=40)


CASES["told"] = _told

# ---- jobs of their own

SECRET = "what the jobs of these tests know"
ALONE = Work(replicas=2, every=2, steps=8, outer_lr=0.7, momentum=0.9, nesterov=True)


def _serves_jobs(folder: str) -> None:
    """Until it is killed, two ranks of a server; the log is written after each push."""
    from hf_dist.parallel.local_sgd.server import ReplicaServer
    from hf_dist.run import main

    home, rank = Path(folder).parent, os.environ["RANK"]
    (home / f"server{rank}").write_text(str(os.getpid()))
    os.environ["HF_DIST_SECRET"] = SECRET
    push = ReplicaServer._push

    def pushes(self: ReplicaServer, *args: Any) -> Any:
        found = push(self, *args)
        (home / f"log{rank}.tmp").write_text(json.dumps(self.log))
        os.replace(home / f"log{rank}.tmp", home / f"log{rank}.json")
        return found

    ReplicaServer._push = pushes  # type: ignore[method-assign]
    role = {"ranks": "rest", "averages": True, "port": int((home / "port").read_text())}
    section = {**ALONE.section, "mode": "server", "dynamic_steps": False}
    file = home / "server.json"
    file.write_text(json.dumps({"local_sgd": section, "hf_dist": {"roles": {"server": role}}}))
    main(["--config", str(file)])


def _is_a_job(act: Act, number: int, folder: str) -> None:
    """A replica that is a job of two ranks."""
    from tests.parallel.local_sgd.served_jobs import Served, train

    home, rank = Path(folder).parent, int(os.environ["RANK"])
    os.environ.update(
        HF_DIST_SECRET=SECRET, HF_DIST_REPLICA=str(number), SERVER=f"127.0.0.1:{(home / 'port').read_text()}"
    )
    found = train(
        rank, 2, Served(ALONE, layout={"zero_optimization": {"stage": 3}}, job="$SERVER"), functools.partial(act, home)
    )
    torch.save(found, home / f"found{number}.{rank}")


def _first_is_killed(home: Path, replica: int, step: int) -> None:
    if step == 6:
        _wait_for((home / "killed").exists)  # both ranks: by the signal that ends their job
        os.kill(os.getpid(), signal.SIGKILL)


def _kills(home: Path, replica: int, step: int) -> None:
    """The first replica dies, and comes again as another job, while this one goes on."""
    if step == 3:
        (home / "killed").touch()


CASES |= {
    "serves": _serves_jobs,
    "dies": functools.partial(_is_a_job, _first_is_killed, 0),
    "comes_again": functools.partial(_is_a_job, _nothing, 0),
    "goes_on": functools.partial(_is_a_job, _kills, 1),
}
