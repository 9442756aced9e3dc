"""Calls that every rank must make: the ranks meet first, so that a rank that is alone gets an error instead of hanging.

The wait is a Python loop, not a gloo call, so that the watchdog, which knows where all ranks are, can end it.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import time
from types import FrameType

from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis, ParallelMesh
from hf_dist.errors import OneRankError

__all__ = ["REMEDY", "every_rank", "line_of_user", "passes_user_code", "report"]

REMEDY = (
    "Every rank has to call it, because each holds a part of the weights: take it out of `if rank == 0:` "
    "(is_main_process, is_world_process_zero). One rank can then write or print the result"
)
_NBYTES = 512
_PAUSE = 0.01
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = tuple({*site.getsitepackages(), sysconfig.get_path("stdlib"), _PACKAGE})

_verdict = ""


def report(verdict: str) -> None:
    """Make this rank's wait in `every_rank` raise `verdict`, because no other rank will come. From any thread."""
    global _verdict
    _verdict = verdict


def every_rank(mesh: ParallelMesh, name: str) -> None:
    """Return when all ranks of the job have made the call `name`. Collective over world.

    Raises `OneRankError` on a rank that is alone: the others have ended, wait for something else (as the watchdog sees), or
    have made a different such call, which raises on them too.
    """
    axis = mesh.calls
    if axis.size == 1:
        return
    called = f"{name} at {line_of_user(sys._getframe(1))}"
    report("")
    try:
        everyone = _gathered(axis, called)
    except RuntimeError as error:
        if isinstance(error, OneRankError):
            raise
        raise OneRankError(f"{called} was called here, and another rank has ended meanwhile. {REMEDY}.") from error
    names = [text.partition(" at ")[0] for text in everyone]
    if len(set(names)) > 1:
        other = next(rank for rank, found in enumerate(names) if found != names[0])
        raise OneRankError(f"rank 0 has called {everyone[0]}, rank {other} {everyone[other]}. {REMEDY}.")


def _gathered(axis: MeshAxis, called: str) -> list[str]:
    text = called.encode()[:_NBYTES]
    rows, work = collectives.begin_gather(axis, text + bytes(_NBYTES - len(text)))
    with collectives.waiting():
        while not work.is_completed():
            _pause(called)
        work.wait()
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


def _pause(called: str) -> None:  # the watchdog reads `called` here
    if _verdict:
        raise OneRankError(_verdict)
    time.sleep(_PAUSE)


def line_of_user(frame: FrameType | None) -> str:
    """`file:line` of the innermost user frame, starting at `frame` and going outwards; "an unknown line" if there is none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", *_LIBRARIES)):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


def passes_user_code(error: BaseException) -> bool:
    """Whether a line of the user's is between where an exception is caught and where it was raised."""
    trace = error.__traceback__
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(("<", *_LIBRARIES)):
            return True
        trace = trace.tb_next
    return False
