"""A schedule as data: for every rank, the list of what it does.

Letters: `F` forward; `B` whole backward; `I` and `W` its two parts where it is split, the gradient of the stage's inputs
(which the previous stage waits for) and that of its weights (which nobody waits for). `communication.py` adds `SF RF SB RB`:
send or receive activations (F) or gradients (B). An action prints as stage, kind, microbatch: `2F0`, `1RB3`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hf_dist.errors import HfDistError

__all__ = ["Action", "Kind", "Schedule", "ScheduleError"]


class ScheduleError(HfDistError, ValueError):
    """A list of actions cannot be run: it misses, repeats or inverts something. The message ends with the grid."""


class Kind(str, Enum):
    """What an action does."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SF"
    RECV_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECV_BACKWARD = "RB"

    @property
    def computes(self) -> bool:
        """Whether it runs the model; the others move tensors."""
        return len(self.value) == 1


@dataclass(frozen=True)
class Action:
    """One entry of a rank's list. Sends and receives name the stage that executes them."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """What every rank does in one step, in order."""

    name: str
    num_ranks: int
    num_stages: int
    """Stages of the model: a multiple of `num_ranks`; stage s runs on rank s % num_ranks."""
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]
    """`ranks[r]`: the actions of rank r."""

    def rank_of(self, stage: int) -> int:
        """The rank that runs `stage`."""
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` runs, first to last."""
        return tuple(range(rank, self.num_stages, self.num_ranks))
