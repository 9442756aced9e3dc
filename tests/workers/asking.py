"""Two ranks that ask a teacher of one rank, and what goes wrong in either role."""

from __future__ import annotations

import atexit
import functools
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

from hf_dist.dist import roles
from hf_dist.remote import asking


def _asks(act: Callable[[str], None], folder: str, waits: timedelta | None = None) -> None:
    """Four calls; `act` is called before the third, on rank 1 of the trainer. The teacher leaves its process number."""
    from hf_dist import DistAccelerator, remote_model
    from tests.remote.jobs import with_teacher

    (Path(folder) / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    sections = with_teacher(str(Path(folder).parent), 1, {"hf_dist": {"stall_report_seconds": 2}})
    sections["hf_dist"]["stall_report_seconds"] = 2
    if waits is not None:
        asking.Asker.__init__.__kwdefaults__["timeout"] = waits
    accelerator = DistAccelerator(dist_config={"zero_optimization": {"stage": 3}, **sections})
    teacher = remote_model("teacher")
    for step in range(4):
        if step == 2 and accelerator.process_index == 1:
            act(folder)
        teacher(input_ids=torch.full((2, 5), 7 + step)).logits.sum()
    print(f"{roles.place().role.name} {accelerator.process_index} is done", flush=True)  # type: ignore[union-attr]
    atexit._run_exitfuncs()


def _asks_for_no_token(folder: str) -> None:
    from hf_dist import remote_model

    remote_model("teacher")(input_ids=torch.full((2, 5), 10**6)).logits.sum()


def _kills_the_teacher(folder: str) -> None:
    os.kill(int((Path(folder) / "pid2").read_text()), signal.SIGKILL)


def _stops_the_teacher(folder: str) -> None:
    """With a time-out of seconds in place of half an hour."""
    os.kill(int((Path(folder) / "pid2").read_text()), signal.SIGSTOP)


def _raises(folder: str) -> None:
    raise KeyError("of the script")


def _is_killed(folder: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


CASES: dict[str, Callable[[str], None]] = {
    "nothing_wrong": functools.partial(_asks, lambda folder: None),
    "no_token": functools.partial(_asks, _asks_for_no_token),
    "teacher_killed": functools.partial(_asks, _kills_the_teacher),
    "teacher_stopped": functools.partial(_asks, _stops_the_teacher, waits=timedelta(seconds=9)),
    "trainer_raises": functools.partial(_asks, _raises),
    "trainer_killed": functools.partial(_asks, _is_killed),
}
