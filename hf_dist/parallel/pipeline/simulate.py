"""Checks and times a schedule without tensors: deadlocks, order, microbatches in flight, bubble."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from hf_dist.parallel.pipeline.actions import Action, Kind, Schedule, ScheduleError
from hf_dist.parallel.pipeline.communication import Channel, add_communication, channel_of, matching_send

__all__ = ["Costs", "Simulation", "Span", "runs_through", "simulate", "validate"]


@dataclass(frozen=True)
class Costs:
    """Time of one action of one stage, in any unit. A whole backward takes `backward_input + backward_weight`."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0
    """Time from the end of the sending computation until the data can be used on the other rank; occupies neither rank."""

    def of(self, kind: Kind) -> float:
        """How long an action of this kind occupies its rank."""
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward_input + self.backward_weight,
            Kind.BACKWARD_INPUT: self.backward_input,
            Kind.BACKWARD_WEIGHT: self.backward_weight,
        }.get(kind, 0.0)


@dataclass(frozen=True)
class Span:
    """When one action ran."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class Simulation:
    """Times and microbatches in flight of a schedule."""

    spans: tuple[tuple[Span, ...], ...]
    """Computations of every rank in order, without sends and receives."""
    makespan: float
    """Time from the start of the first action to the end of the last."""
    bubble: float
    """Idle share of all ranks' time, 0 to 1."""
    in_flight: tuple[int, ...]
    """Per stage, the largest number of microbatches whose forward has run but whose (weight) backward has not ended."""


def validate(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless every stage runs every microbatch once, in an order that can be run.

    Accepts a schedule with or without sends and receives.
    """
    split = _has(schedule, Kind.BACKWARD_INPUT)
    backwards = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT) if split else (Kind.BACKWARD,)
    expected = (Kind.FORWARD, *(backwards if split or _has(schedule, Kind.BACKWARD) else ()))
    for rank, actions in enumerate(schedule.ranks):
        counts = Counter(actions)
        for stage in schedule.stages_of(rank):
            for microbatch in range(schedule.num_microbatches):
                wanted = [Action(stage, kind, microbatch) for kind in expected]
                for action in wanted:
                    if counts.pop(action, 0) != 1:
                        raise _error(schedule, f"rank {rank} does not run {action} exactly once")
                positions = [actions.index(action) for action in wanted]
                if positions != sorted(positions):
                    raise _error(schedule, f"rank {rank} runs {' '.join(map(str, wanted))} in another order")
        strangers = [a for a, n in counts.items() if n != 1 or a.kind.computes]
        if strangers:
            raise _error(schedule, f"rank {rank} has an unknown or repeated action {strangers[0]}")
    complete = schedule if _communicates(schedule) else add_communication(schedule)
    _check_channels(complete)
    simulate(complete)


def runs_through(schedule: Schedule) -> bool:
    """Whether no rank waits forever."""
    try:
        simulate(schedule)
    except ScheduleError:
        return False
    return True


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Simulate a schedule: every rank runs its actions in order and waits for its receives; sends do not wait.

    Raises `ScheduleError`, with the grid, if the ranks deadlock.
    """
    costs = costs or Costs()
    schedule = schedule if _communicates(schedule) else add_communication(schedule)
    done: dict[Action, float] = {}
    clocks = [0.0] * schedule.num_ranks
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    positions = [0] * schedule.num_ranks
    while True:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while positions[rank] < len(actions):
                action = actions[positions[rank]]
                ready = _ready_at(action, done, costs)
                if ready is None:
                    break
                start = max(clocks[rank], ready)
                clocks[rank] = done[action] = start + costs.of(action.kind)
                if action.kind.computes:
                    spans[rank].append(Span(action, start, clocks[rank]))
                positions[rank] += 1
                moved = True
        if not moved:
            break
    stuck = [r for r, actions in enumerate(schedule.ranks) if positions[r] < len(actions)]
    if stuck:
        waits = "; ".join(f"rank {r} waits at {schedule.ranks[r][positions[r]]}" for r in stuck)
        raise _error(schedule, f"the schedule dead-locks: {waits}")
    makespan = max(clocks)
    busy = sum(span.stop - span.start for rank_spans in spans for span in rank_spans)
    bubble = 1 - busy / (makespan * schedule.num_ranks) if makespan else 0.0
    return Simulation(tuple(map(tuple, spans)), makespan, bubble, _in_flight(schedule))


def _ready_at(action: Action, done: dict[Action, float], costs: Costs) -> float | None:
    """Time at which an action's input is available; None if its send has not been simulated yet."""
    if action.kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD):
        sent = done.get(matching_send(action))
        return None if sent is None else sent + costs.transfer
    return 0.0


def _in_flight(schedule: Schedule) -> tuple[int, ...]:
    peaks, now = [0] * schedule.num_stages, [0] * schedule.num_stages
    last = Kind.BACKWARD_WEIGHT if _has(schedule, Kind.BACKWARD_WEIGHT) else Kind.BACKWARD
    for actions in schedule.ranks:
        for action in actions:
            now[action.stage] += (action.kind is Kind.FORWARD) - (action.kind is last)
            peaks[action.stage] = max(peaks[action.stage], now[action.stage])
    return tuple(peaks) if _has(schedule, last) else (0,) * schedule.num_stages


def _check_channels(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless both ends of every channel list the same transfers in the same order."""
    sends, receives = defaultdict(list), defaultdict(list)
    for channel, action in _transfers(schedule):
        if action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            sends[channel].append(action)
        else:
            receives[channel].append(matching_send(action))
    for channel in {*sends, *receives}:
        if sends[channel] != receives[channel]:
            raise _error(schedule, f"rank {channel.target} does not receive from rank {channel.source} in its order")


def _transfers(schedule: Schedule) -> Iterator[tuple[Channel, Action]]:
    for actions in schedule.ranks:
        for action in actions:
            if (channel := channel_of(schedule, action)) is not None:
                yield channel, action


def _communicates(schedule: Schedule) -> bool:
    return any(not action.kind.computes for actions in schedule.ranks for action in actions)


def _has(schedule: Schedule, kind: Kind) -> bool:
    return any(action.kind is kind for actions in schedule.ranks for action in actions)


def _error(schedule: Schedule, message: str) -> ScheduleError:
    lines = [f"rank {r}: " + " ".join(map(str, actions)) for r, actions in enumerate(schedule.ranks)]
    return ScheduleError("\n".join([f"{schedule.name}: {message}", *lines]))
