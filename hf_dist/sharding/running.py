"""What runs on this thread: a forward of the whole model, or a recomputation inside a backward."""

from __future__ import annotations

import sys
from types import FrameType

import torch


class OuterForward:
    """Counts the running forwards of modules that contain every unit: a head's model runs its base model inside."""

    def __init__(self) -> None:
        self.depth = 0
        """How many of them run, by the hooks that torch called."""
        self._frame: FrameType | None = None  # of the outermost one's call, while it runs

    @property
    def was_cut_off(self) -> bool:
        """Whether Ctrl-C ended a forward, so that torch called no hook at its end."""
        return self.depth > 0 and not _runs(self._frame)

    def enter(self, hooks: int) -> bool:
        """Called by a hook before such a forward, `hooks` frames above this call; True for the outermost one."""
        self.depth += 1
        if self.depth == 1:
            self._frame = sys._getframe(hooks + 1)  # the module's call, above the frames of its hook
        return self.depth == 1

    def leave(self) -> bool:
        """Called after it; True for the outermost one."""
        self.depth -= 1
        if self.depth == 0:
            self._frame = None
        return self.depth == 0

    def end(self) -> None:
        """Forget forwards that were cut off."""
        self.depth, self._frame = 0, None


def _runs(frame: FrameType | None) -> bool:
    """Whether the function of `frame` is still running on the current thread."""
    here: FrameType | None = sys._getframe(1)
    while here is not None and here is not frame:
        here = here.f_back
    return here is not None


def recomputing() -> bool:
    """Whether autograd is running a backward. A forward is then a recomputation (activation checkpointing)."""
    return torch._C._current_graph_task_id() != -1
