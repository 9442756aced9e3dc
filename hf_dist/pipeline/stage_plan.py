"""The plan of a split: what each stage runs, holds, receives and sends. Plain data, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_dist.pipeline.probe import BlockCall, Probe, TensorSpec

__all__ = ["Boundary", "SharedParameter", "StagePlan", "make_plan"]


@dataclass(frozen=True)
class Boundary:
    """What crosses from one stage to the next, in this order: the values, then what HF collected."""

    values: tuple[int, ...]
    """Numbers of the tensors (`Argument.value`)."""
    paths: tuple[str, ...]
    """Where each of them is first passed, for messages."""
    collected: tuple[tuple[str, int], ...]
    specs: tuple[TensorSpec, ...]
    """Of all tensors, for the batch of the probe; shapes may differ in every microbatch."""


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several stages hold a copy of; its gradient is the sum over them."""

    names: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True)
class StagePlan:
    """How a model is cut."""

    calls: tuple[BlockCall, ...]
    bounds: tuple[int, ...]
    """Stage s runs the block calls from bounds[s] up to bounds[s + 1]."""
    boundaries: tuple[Boundary, ...]
    """boundaries[s]: from stage s to stage s + 1."""
    blocks: frozenset[str]
    outside: frozenset[str]
    owners: dict[str, tuple[int, ...]]
    """Parameter, by its name in `named_parameters` of the whole model -> stages that hold it."""
    shared: tuple[SharedParameter, ...]
    loose: frozenset[str]
    """Parameters that code around the modules reads itself."""
    in_place: bool = False
    """Write what is received into the stand-ins, so that code around the blocks (a residual past one) sees it too; costs a
    copy. Otherwise it only takes their places among the arguments of blocks."""

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.bounds) - 1

    def names_of(self, stage: int) -> tuple[str, ...]:
        """Names of the parameters that `stage` holds."""
        return tuple(name for name, stages in self.owners.items() if stage in stages)


def make_plan(probe: Probe, bounds: Sequence[int]) -> StagePlan:
    """Cut the probed model at `bounds` (see `partition`)."""
    bounds = tuple(bounds)
    num_stages = len(bounds) - 1

    def stage_of(source: int) -> int:
        # What runs between two calls prepares the later one, and is done by the stage that ends there.
        call, is_call = divmod(source, 2)
        position = call if is_call else max(call - 1, 0)
        return next(s for s in range(num_stages) if position < bounds[s + 1])

    owners, shared = {}, []
    for names in probe.params:
        first = names[0]
        stages = {stage_of(source) for source in probe.positions.get(first, ())}
        # Code around the modules runs on every stage until it leaves, so what it reads must be there.
        for position in probe.loose_reads.get(first, ()):
            stages |= set(range(stage_of(2 * position), num_stages))
        owners[first] = tuple(sorted(stages or {0}))
        if len(stages) > 1:
            shared.append(SharedParameter(names, owners[first]))
    return StagePlan(
        calls=probe.calls,
        bounds=bounds,
        boundaries=tuple(_boundary(probe.calls, cut) for cut in bounds[1:-1]),
        blocks=probe.blocks,
        outside=probe.outside,
        owners=owners,
        shared=tuple(shared),
        loose=frozenset(name for name, positions in probe.loose_reads.items() if positions),
    )


def _boundary(calls: tuple[BlockCall, ...], cut: int) -> Boundary:
    """Whatever the call at `cut` takes that was computed from parameters (or drawn at random), and what later ones take
    again that an earlier one took: the next stage cannot make these itself."""
    here = [a for a in calls[cut].arguments if a.sources]
    earlier = {a.value for call in calls[:cut] for a in call.arguments if a.sources}
    again = [a for call in calls[cut + 1 :] for a in call.arguments if a.value in earlier]
    arguments = {a.value: a for a in reversed([*here, *again])}
    chosen = [arguments[value] for value in dict.fromkeys(a.value for a in [*here, *again])]
    return Boundary(
        values=tuple(a.value for a in chosen),
        paths=tuple(a.path for a in chosen),
        collected=calls[cut].collected,
        specs=(*(a.spec for a in chosen), *calls[cut].collected_specs),
    )
