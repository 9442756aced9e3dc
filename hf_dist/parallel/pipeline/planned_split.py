"""Turns a model and an example batch into a verified plan, and describes it for the start-up report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from hf_dist.errors import ModelError
from hf_dist.format_bytes import size_text
from hf_dist.parallel.pipeline.partition import Partition, partition
from hf_dist.parallel.pipeline.probe import probe
from hf_dist.parallel.pipeline.stage_plan import StagePlan, make_plan
from hf_dist.parallel.pipeline.verify import verify

__all__ = ["PlannedSplit", "plan_stages"]

_SMALL_NBYTES = 2 << 30


@dataclass(frozen=True)
class PlannedSplit:
    """A plan that passed `verify`, with the partition it was made from."""

    plan: StagePlan
    partition: Partition
    nbytes: tuple[int, ...]
    """Bytes of each stage's parameters; shared parameters count on every stage that holds them."""

    def describe(self) -> str:
        """One line per stage with its blocks, share of the time and bytes; then the efficiency of the split."""
        plan, total = self.plan, sum(self.partition.costs) or 1.0
        lines = []
        for stage in range(plan.num_stages):
            first, last = plan.calls[plan.bounds[stage]].module, plan.calls[plan.bounds[stage + 1] - 1].module
            count = plan.bounds[stage + 1] - plan.bounds[stage]
            blocks = f"{count} blocks, {first} to {last}" if count > 1 else f"1 block, {first}"
            head = " with the output layer" if stage == plan.num_stages - 1 and self._ends_with_a_head() else ""
            lines.append(
                f"stage {stage}: {blocks}, {self.partition.costs[stage] / total:.1%} of the time{head}, "
                f"{size_text(self.nbytes[stage])} of weights"
            )
        shared = "; ".join(f"{s.names[0]} on stages {', '.join(map(str, s.stages))}" for s in plan.shared)
        efficiency = f"the slowest stage allows {self.partition.efficiency:.1%} of the ideal speed, bubble not counted"
        return "\n".join([*lines, efficiency, *([f"shared: {shared}"] if shared else [])])

    def _ends_with_a_head(self) -> bool:
        """Whether the last stage has parameters outside of the blocks."""
        blocks = tuple(f"{call.module}." for call in self.plan.calls)
        return any(not name.startswith(blocks) for name in self.plan.names_of(self.plan.num_stages - 1))


def plan_stages(
    model: nn.Module,
    batch: Mapping[str, object],
    num_stages: int,
    *,
    method: str | Sequence[int] = "cost",
    run: Callable[[nn.Module, object], object] | None = None,
    recompute: bool = False,
) -> PlannedSplit:
    """Probe, partition, cut and verify. Local, with the same result on every rank; leaves `model` (real or meta) unchanged.

    `num_stages`: ranks times stages per rank. `method`: see `partition`. `run(model, batch)`: how training calls the model.
    `recompute`: training recomputes blocks; otherwise the model says so (HF's activation checkpointing is on).
    Raises `TopologyError` for an impossible partition, `ModelError` for a model that cannot be split correctly.
    """
    recompute = recompute or any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    real = False
    try:
        found = probe(model, batch, run)
    except ModelError:
        if not _is_small(model):
            raise
        found, real = probe(model, batch, run, real=True), True
    chosen = partition(found.costs(recompute), num_stages, method)
    plan = make_plan(found, chosen.bounds)
    try:
        plan = verify(model, plan, batch, run, real=real)
    except ModelError as error:
        plan = replace(plan, in_place=True)
        try:
            plan = verify(model, plan, batch, run, real=real)
        except ModelError:
            raise error from None
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    return PlannedSplit(plan, chosen, tuple(sum(sizes[n] for n in plan.names_of(s)) for s in range(num_stages)))


def _is_small(model: nn.Module) -> bool:
    """Whether the model is real and small enough to copy for a forward with elements."""
    params = list(model.parameters())
    return not any(p.is_meta for p in params) and sum(p.numel() * p.element_size() for p in params) <= _SMALL_NBYTES
