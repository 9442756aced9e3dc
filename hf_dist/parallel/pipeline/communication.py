"""Adds the actions that move tensors to a schedule, in an order derived from its computations."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from hf_dist.parallel.pipeline.actions import Action, Kind, Schedule

__all__ = ["Channel", "add_communication", "channel_of", "matching_send"]

_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
_RECEIVES = (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)


@dataclass(frozen=True)
class Channel:
    """All transfers of one kind from one rank to another; first in, first out."""

    source: int
    target: int
    kind: str
    """F: activations, B: gradients."""


def channel_of(schedule: Schedule, action: Action) -> Channel | None:
    """The channel a send or receive uses; None for a computation."""
    rank = schedule.rank_of(action.stage)
    if action.kind in _SENDS:
        step = 1 if action.kind is Kind.SEND_FORWARD else -1
        return Channel(rank, schedule.rank_of(action.stage + step), action.kind.value[1])
    if action.kind in _RECEIVES:
        step = -1 if action.kind is Kind.RECV_FORWARD else 1
        return Channel(schedule.rank_of(action.stage + step), rank, action.kind.value[1])
    return None


def matching_send(action: Action) -> Action:
    """The send that a receive waits for."""
    if action.kind is Kind.RECV_FORWARD:
        return Action(action.stage - 1, Kind.SEND_FORWARD, action.microbatch)
    return Action(action.stage + 1, Kind.SEND_BACKWARD, action.microbatch)


def add_communication(schedule: Schedule) -> Schedule:
    """The same schedule with a send right after each computation and a receive before each action that needs it.

    Receives of a channel are in the order of its sends (transfers of a channel cannot overtake each other), each as late as
    that allows. Adjacent stages on the same rank pass tensors in memory.
    """
    sending = [_with_sends(schedule, rank) for rank in schedule.ranks]
    sent: dict[Channel, list[Action]] = defaultdict(list)
    for actions in sending:
        for action in actions:
            if (channel := channel_of(schedule, action)) is not None:
                sent[channel].append(action)
    ranks = tuple(tuple(_with_receives(schedule, rank, actions, sent)) for rank, actions in enumerate(sending))
    return replace(schedule, ranks=ranks)


def _with_sends(schedule: Schedule, actions: tuple[Action, ...]) -> list[Action]:
    result: list[Action] = []
    for action in actions:
        result.append(action)
        stage = action.stage
        if action.kind is Kind.FORWARD and stage + 1 < schedule.num_stages and _crosses(schedule, stage, stage + 1):
            result.append(replace(action, kind=Kind.SEND_FORWARD))
        if action.kind in _BACKWARDS and stage > 0 and _crosses(schedule, stage, stage - 1):
            result.append(replace(action, kind=Kind.SEND_BACKWARD))
    return result


def _with_receives(
    schedule: Schedule, rank: int, actions: list[Action], sent: dict[Channel, list[Action]]
) -> list[Action]:
    needed_at = {(a.stage, a.kind, a.microbatch): position for position, a in enumerate(actions)}
    before: dict[int, list[Action]] = defaultdict(list)
    for channel, sends in sent.items():
        if channel.target != rank:
            continue
        latest = len(actions)
        for send in reversed(sends):  # a receive must not come after the receive of a later send
            stage = send.stage + 1 if channel.kind == "F" else send.stage - 1
            consumers = (Kind.FORWARD,) if channel.kind == "F" else _BACKWARDS
            latest = min(latest, *(needed_at.get((stage, kind, send.microbatch), len(actions)) for kind in consumers))
            kind = Kind.RECV_FORWARD if channel.kind == "F" else Kind.RECV_BACKWARD
            before[latest].insert(0, Action(stage, kind, send.microbatch))
    result: list[Action] = []
    for position, action in enumerate(actions):
        result += [*before[position], action]
    return result + before[len(actions)]


def _crosses(schedule: Schedule, stage: int, other: int) -> bool:
    return schedule.rank_of(stage) != schedule.rank_of(other)
