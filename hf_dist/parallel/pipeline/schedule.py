"""The schedules: every rank's computations (`actions.py`) as pure functions of P, M and V.

P ranks, V stages per rank, stage s on rank s % P; M microbatches. In every schedule, each stage runs the backwards of its
microbatches in the order 0 .. M-1, so the last microbatch is the last everywhere (gradients are reduced in it).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from hf_dist.errors import TopologyError
from hf_dist.parallel.pipeline.actions import Action, Kind, Schedule
from hf_dist.parallel.pipeline.simulate import runs_through

__all__ = ["SCHEDULES", "forward_only", "make_schedule"]


Order = list[tuple[int, int]]  # (stage, microbatch)


def gpipe(num_ranks: int, num_microbatches: int, virtual_stages: int = 1) -> Schedule:
    """All forwards, then all backwards. Keeps M microbatches in flight. (GPipe, Huang et al. 2019.)"""
    _require_one_stage_per_rank("gpipe", virtual_stages)

    def actions(rank: int) -> Iterator[Action]:
        yield from (Action(rank, Kind.FORWARD, m) for m in range(num_microbatches))
        yield from (Action(rank, Kind.BACKWARD, m) for m in range(num_microbatches))

    return _assemble("gpipe", num_ranks, num_microbatches, 1, actions)


def one_f_one_b(num_ranks: int, num_microbatches: int, virtual_stages: int = 1) -> Schedule:
    """1F1B: rank r keeps at most P - r microbatches in flight. (PipeDream-Flush, Narayanan et al. 2020.)"""
    _require_one_stage_per_rank("1f1b", virtual_stages)

    def actions(rank: int) -> Iterator[Action]:
        order = [(rank, m) for m in range(num_microbatches)]
        yield from _one_by_one(order, order, num_ranks - rank)

    return _assemble("1f1b", num_ranks, num_microbatches, 1, actions)


def interleaved_1f1b(num_ranks: int, num_microbatches: int, virtual_stages: int = 2) -> Schedule:
    """1F1B over V stages per rank: microbatches run in rounds of about P. (Megatron-LM, Narayanan et al. 2021.)

    Accepts any M: rounds are as equal as possible and, if M allows, never smaller than P. If the paper's warm-up deadlocks,
    it gets the smallest number of additional forwards that works, found by trial.
    """
    rounds = _rounds(num_ranks, num_microbatches)
    total = num_microbatches * virtual_stages

    def attempt(extra: int) -> Schedule:
        def actions(rank: int) -> Iterator[Action]:
            stages = range(rank, num_ranks * virtual_stages, num_ranks)
            forward = [(s, m) for group in rounds for s in stages for m in group]
            backward = [(s, m) for group in rounds for s in reversed(stages) for m in group]
            one_stage = virtual_stages == 1
            full = 2 * (num_ranks - rank - 1) + (virtual_stages - 1) * len(rounds[0]) + 1
            warm_up = num_ranks - rank if one_stage else full
            yield from _one_by_one(forward, backward, warm_up + extra)

        return _assemble("interleaved_1f1b", num_ranks, num_microbatches, virtual_stages, actions)

    return next(schedule for schedule in map(attempt, range(total + 1)) if runs_through(schedule))


def zb_h1(num_ranks: int, num_microbatches: int, virtual_stages: int = 1) -> Schedule:
    """Zero-bubble H1: 1F1B whose weight gradients on rank r lag r microbatches behind and fill the end of the step.

    At most P microbatches are in flight on every rank, as on the first rank of 1F1B. (Qi et al. 2023, "Zero Bubble Pipeline
    Parallelism".)
    """
    _require_one_stage_per_rank("zb_h1", virtual_stages)

    def actions(rank: int) -> Iterator[Action]:
        order = [(rank, m) for m in range(num_microbatches)]
        weights = iter(order)
        for action in _one_by_one(order, order, num_ranks - rank):
            if action.kind is Kind.FORWARD:
                yield action
                continue
            yield Action(rank, Kind.BACKWARD_INPUT, action.microbatch)
            if action.microbatch >= rank:
                yield Action(rank, Kind.BACKWARD_WEIGHT, next(weights)[1])
        yield from (Action(rank, Kind.BACKWARD_WEIGHT, m) for _, m in weights)

    return _assemble("zb_h1", num_ranks, num_microbatches, 1, actions)


def forward_only(num_ranks: int, num_microbatches: int, virtual_stages: int = 1) -> Schedule:
    """Evaluation: every rank runs the microbatches in order, in rounds of about P if it has several stages."""
    rounds = _rounds(num_ranks, num_microbatches)

    def actions(rank: int) -> Iterator[Action]:
        stages = range(rank, num_ranks * virtual_stages, num_ranks)
        yield from (Action(s, Kind.FORWARD, m) for group in rounds for s in stages for m in group)

    return _assemble("forward_only", num_ranks, num_microbatches, virtual_stages, actions)


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "zb_h1": zb_h1,
}
"""Value of `pipeline.schedule` -> training schedule f(P, M, V)."""


def make_schedule(name: str, num_ranks: int, num_microbatches: int, virtual_stages: int = 1) -> Schedule:
    """The schedule called `name`, computation only. Raises `TopologyError` for unknown names and numbers below 1."""
    if name not in SCHEDULES:
        raise TopologyError(f"pipeline.schedule: {name!r} is not one of {', '.join(SCHEDULES)}")
    counts = {"stages": num_ranks, "microbatches": num_microbatches, "virtual_stages": virtual_stages}
    for key, value in counts.items():
        if value < 1:
            raise TopologyError(f"pipeline.{key}: {value} is below 1")
    return SCHEDULES[name](num_ranks, num_microbatches, virtual_stages)


def _rounds(num_ranks: int, num_microbatches: int) -> list[range]:
    """The microbatches in order, in M // P rounds (at least one) whose sizes differ by at most one, longer ones first."""
    count = max(1, num_microbatches // num_ranks)
    small, longer = divmod(num_microbatches, count)
    starts = [i * small + min(i, longer) for i in range(count + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def _one_by_one(forward: Order, backward: Order, warm_up: int) -> Iterator[Action]:
    """`warm_up` forwards, then one backward and one forward alternately, then the remaining backwards."""
    f = [Action(s, Kind.FORWARD, m) for s, m in forward]
    b = [Action(s, Kind.BACKWARD, m) for s, m in backward]
    warm_up = min(warm_up, len(f))
    yield from f[:warm_up]
    for index, action in enumerate(b):
        yield action
        yield from f[warm_up + index : warm_up + index + 1]


def _require_one_stage_per_rank(name: str, virtual_stages: int) -> None:
    if virtual_stages != 1:
        raise TopologyError(
            f'pipeline.virtual_stages: {virtual_stages} needs "schedule": "interleaved_1f1b"; {name!r} runs one stage per rank'
        )


def _assemble(
    name: str, num_ranks: int, num_microbatches: int, virtual_stages: int, actions: Callable[[int], Iterator[Action]]
) -> Schedule:
    ranks = tuple(tuple(actions(rank)) for rank in range(num_ranks))
    return Schedule(name, num_ranks, num_ranks * virtual_stages, num_microbatches, ranks)
