"""A schedule as data: a list of actions for every rank.

Letters: `F` forward; `B` whole backward; `I` and `W` the two parts of a split backward: the gradient of the stage's inputs
(for which the previous stage waits) and the gradient of its weights (for which no stage waits). `communication.py` adds
`SF RF SB RB`: send or receive activations (F) or gradients (B). An action prints as stage, kind, microbatch: `2F0`, `1RB3`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hf_dist.errors import HfDistError

__all__ = ["Action", "Kind", "Schedule", "ScheduleError"]


class ScheduleError(HfDistError, ValueError):
    """A schedule cannot be run: actions are missing, repeated or in the wrong order. The message ends with the grid."""


class Kind(str, Enum):
    """Kind of an action."""

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
        """Whether the action runs the model; other actions move tensors."""
        return len(self.value) == 1


@dataclass(frozen=True)
class Action:
    """One entry of a rank's list. Sends and receives name the stage that executes them."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @property
    def words(self) -> str:
        """The same, for an error: `stage 0, send activations, microbatch 1`."""
        return f"stage {self.stage}, {_WORDS[self.kind]}, microbatch {self.microbatch}"


_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward to the inputs",
    Kind.BACKWARD_WEIGHT: "backward to the weights",
    Kind.SEND_FORWARD: "send activations",
    Kind.RECV_FORWARD: "receive activations",
    Kind.SEND_BACKWARD: "send gradients",
    Kind.RECV_BACKWARD: "receive gradients",
}


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank in one step, in order."""

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
