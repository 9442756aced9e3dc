"""One class in a process of its own, so that a crash or a hang is one row of the table."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable
from typing import Any

import torch

Outcome = tuple[str, str]
"""One word, and what is said about it."""
Work = Callable[[Callable[[], None]], Outcome]
"""Given `built`, which it calls when the plain model has run."""


def _child(work: Work, pipe: Any) -> None:
    torch.set_num_threads(1)
    pipe.send(work(lambda: pipe.send(None)))


def in_fork(work: Work, seconds: float) -> Outcome:
    """What `work` answers; "not built" or, after that, "failed" when the process ends or is silent for `seconds`."""
    here, there = mp.Pipe(duplex=False)
    child = mp.get_context("fork").Process(target=_child, args=(work, there))
    child.start()
    there.close()
    so_far = "not built"
    try:
        while here.poll(seconds):
            answer: Outcome | None = here.recv()
            if answer is not None:
                return answer
            so_far = "failed"
        return so_far, f"no answer within {seconds} s"
    except EOFError:
        return so_far, "the process ended"
    finally:
        if child.is_alive():
            child.kill()
        child.join()
