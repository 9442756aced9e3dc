"""The plan of a split: the calls, parameters, inputs and outputs of each stage. Plain data, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_dist.parallel.pipeline.probe import BlockCall, Probe, TensorSpec

__all__ = ["Boundary", "SharedParameter", "StagePlan", "make_plan"]


@dataclass(frozen=True)
class Boundary:
    """The tensors sent from one stage to the next: first `values`, then those that HF collected."""

    values: tuple[int, ...]
    """Numbers of the tensors (`Argument.value`)."""
    paths: tuple[str, ...]
    """Argument path at which each is first passed, for messages."""
    collected: tuple[tuple[str, int], ...]
    specs: tuple[TensorSpec, ...]
    """Specs of all tensors for the probe's batch; shapes may differ in every microbatch."""


@dataclass(frozen=True)
class SharedParameter:
    """A parameter of which several stages hold a copy; its gradient is the sum over these stages."""

    names: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True)
class StagePlan:
    """How a model is cut."""

    calls: tuple[BlockCall, ...]
    bounds: tuple[int, ...]
    """Stage s runs the block calls from bounds[s] up to bounds[s + 1]."""
    boundaries: tuple[Boundary, ...]
    """boundaries[s]: the tensors sent from stage s to stage s + 1."""
    blocks: frozenset[str]
    outside: frozenset[str]
    owners: dict[str, tuple[int, ...]]
    """Name of a parameter in `named_parameters` of the whole model -> stages that hold it."""
    shared: tuple[SharedParameter, ...]
    loose: frozenset[str]
    """Parameters that code around the modules reads directly."""
    in_place: bool = False
    """Copy received tensors into the stand-ins, so that code around the blocks (a residual past a block) sees them too.
    Otherwise they only replace the stand-ins among the arguments of blocks."""
    absent: frozenset[str] = frozenset()
    """Outputs that the last stage would compute from earlier stages' values, which it does not have: reading one raises."""
    outputs: frozenset[str] | None = frozenset()
    """The example's other outputs, which the last stage computes; None while `verify` looks."""

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    def names_of(self, stage: int) -> tuple[str, ...]:
        """Names of the parameters that `stage` holds."""
        return tuple(name for name, stages in self.owners.items() if stage in stages)


def make_plan(probe: Probe, bounds: Sequence[int]) -> StagePlan:
    """The plan for cutting the probed model at `bounds` (see `partition`). Pure."""
    bounds = tuple(bounds)
    num_stages = len(bounds) - 1

    def stage_of(source: int) -> int:
        # Modules between two block calls prepare the later call, but run on the stage of the earlier one.
        call, is_call = divmod(source, 2)
        position = call if is_call else max(call - 1, 0)
        return next(s for s in range(num_stages) if position < bounds[s + 1])

    owners: dict[str, tuple[int, ...]] = {}
    shared: list[SharedParameter] = []
    unreached: list[tuple[str, ...]] = []
    for names in probe.params:
        first = names[0]
        stages = {stage_of(source) for source in probe.positions.get(first, ())}
        # Code around the modules runs on every stage up to its exit, so these stages need the parameters it reads.
        for position in probe.loose_reads.get(first, ()):
            stages |= set(range(stage_of(2 * position), num_stages))
        if not stages:
            unreached.append(names)
            continue
        owners[first] = tuple(sorted(stages))
        if len(stages) > 1:
            shared.append(SharedParameter(names, owners[first]))
    near = {names: _stages_around(names[0], owners) for names in unreached}
    for names, around in near.items():
        owners[names[0]] = around
        if len(around) > 1:
            shared.append(SharedParameter(names, around))
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


def _stages_around(name: str, owners: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Stages of a parameter that the example's rows did not reach (an expert, say): those of the module around it. Pure.

    Other rows may reach it, on the stage that runs its module.
    """
    path = name
    while "." in path:
        path = path.rpartition(".")[0]
        around = {stages for other, stages in owners.items() if other.startswith(path + ".")}
        if len(around) == 1:
            return around.pop()
    return (0,)


def _boundary(calls: tuple[BlockCall, ...], cut: int) -> Boundary:
    """The tensors that the next stage cannot compute itself: arguments of the call at `cut` that depend on parameters or
    random draws, and arguments of earlier calls that later calls take again."""
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
