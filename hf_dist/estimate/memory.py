"""Will it fit: states, activations and what comes and goes, on the fullest rank of a job, from a config and a meta model.

Exact: everything that rests between two steps (`states.py`). Estimated: the peak on the device, the larger of two moments:

    the loss      resting + gathered + gradients of earlier microbatches + activations + logits
    backward      resting + the block that is computed again + the most, as one unit follows the other, of
                  gathered weights + activations that are left + gradients on their way + reduced gradients

Not counted: the CUDA context, the allocator's fragments, memory of other programs, and on the host the program itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hf_dist.config import DistConfig, axes_of, settled
from hf_dist.errors import HfDistError
from hf_dist.estimate.activations import Activations, Kept, measure_activations, text_batch
from hf_dist.estimate.residency import budget_nbytes, keep_within
from hf_dist.estimate.states import States
from hf_dist.offload.store import Tier
from hf_dist.pipeline import make_schedule, plan_stages, simulate
from hf_dist.pipeline.planning import PlannedSplit


@dataclass(frozen=True)
class Workload:
    """What one rank computes at a time."""

    micro: int
    """Samples per rank and microbatch."""
    seq: int
    """Tokens per sample."""
    checkpointing: bool = False
    """Whether `gradient_checkpointing` of the TrainingArguments is on."""
    arguments: tuple[Sequence[Any], Mapping[str, Any]] | None = None
    """Of one call of the model with a microbatch, without labels, instead of token numbers of that size."""


@dataclass(frozen=True)
class Limits:
    """What there is; bytes, None where it is not known."""

    device: int | None = None
    """Of one rank."""
    host: int | None = None
    """Of one machine."""
    ranks_per_machine: int = 1


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank."""

    states: States
    kept: Kept | None
    """Activations of one microbatch; None where the model could not be run on meta."""
    in_flight: int
    """Microbatches whose activations are kept at a time: more than one in a pipeline."""
    logits: int
    checkpoint: int
    """On disk, of the whole job."""
    stage: int = 0
    """The pipeline stage's rank; 0 without one."""
    problem: str = ""
    """Why there are no activations."""

    @property
    def activations(self) -> int:
        """On the device, from forward to backward."""
        return self.kept.device * self.in_flight if self.kept else 0

    @property
    def recomputed(self) -> int:
        """Of the block that is computed again."""
        return self.kept.recomputed if self.kept else 0

    @property
    def passing(self) -> int:
        """Gradients of activations in a block's backward."""
        return self.kept.passing if self.kept else 0

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait for later microbatches."""
        return (settled(self.states.config.gradient_accumulation_steps) or 1) > 1 or self.in_flight > 1

    @property
    def waiting(self) -> int:
        """Gradients of earlier microbatches."""
        if not self.accumulates:
            return 0
        return self.states.window_nbytes() if self.states.collects_window else self.states.nbytes.gradients[Tier.DEVICE]

    @cached_property
    def backward(self) -> int:
        """What comes and goes at the fullest moment of the backward, one block that is computed again included."""
        states = self.states
        if self.accumulates and states.collects_window:
            # The window's sums give way to what is reduced, which is never more: the beginning is the fullest.
            return self.activations + self.waiting + states.gathered_nbytes + self.recomputed + self.passing
        return states.backward_nbytes(self.activations, self.recomputed + self.passing, accumulated=self.accumulates)

    @cached_property
    def device_peak(self) -> int:
        """See the module."""
        loss = self.states.gathered_at_loss_nbytes + self.waiting + self.activations + self.logits
        return self.states.nbytes.resident(Tier.DEVICE) + max(loss, self.backward)

    @property
    def host(self) -> int:
        """On the host, of one rank."""
        return self.states.nbytes.resident(Tier.HOST) + (self.kept.host * self.in_flight if self.kept else 0)

    @property
    def disk(self) -> int:
        """Offloaded states of one rank on disk."""
        return self.states.nbytes.resident(Tier.DISK)

    def over(self, limits: Limits) -> int:
        """Bytes that are missing, over all kinds of memory; 0 if it fits."""
        missing = 0 if limits.device is None else max(0, self.device_peak - limits.device)
        if limits.host is not None:
            missing += max(0, self.host * limits.ranks_per_machine - limits.host)
        return missing

    def rows(self) -> list[tuple[str, int, str]]:
        """(what, bytes, "exact" or how it is meant) of one rank; nothing that is zero."""
        rows = [
            ("gradients of earlier microbatches", self.waiting, "estimate"),
            ("activations", self.activations, "measured on meta"),
            ("one block computed again", self.recomputed, "measured on meta"),
            ("gradients of a block's activations", self.passing, "estimate"),
            ("activations on the host", self.kept.host * self.in_flight if self.kept else 0, "measured on meta"),
            ("logits and loss", self.logits, "estimate"),
            ("all that comes and goes in backward", self.backward, "at most"),
        ]
        return self.states.rows() + [row for row in rows if row[1]]

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "rows": [{"what": what, "bytes": nbytes, "kind": kind} for what, nbytes, kind in self.rows()],
            "device_peak": self.device_peak,
            "host": self.host,
            "disk": self.disk,
            "checkpoint": self.checkpoint,
            "pipeline_rank": self.stage,
            "problem": self.problem,
        }


class Planner:
    """Plans for one model on a number of ranks, under one config or many; what does not change is measured once."""

    def __init__(self, model: nn.Module, world_size: int, workload: Workload, device: int | None = None) -> None:
        """`model` may be on meta; `world_size` counts all ranks; `device`: bytes that a rank has there, if known."""
        self.model = model
        self.world_size = world_size
        self.workload = workload
        self.device = device
        self._measured: dict[tuple[int, str], Activations | str] = {}
        self._splits: dict[tuple[int, Any], PlannedSplit] = {}

    def plan(self, config: DistConfig) -> MemoryPlan:
        """The fullest rank under a resolved `config`, its `memory_budget` spent. Raises `ConfigError`, `ModelError`."""
        plans = [self.plan_rank(config, rank) for rank in range(config.pipeline.stages)]
        budget = budget_nbytes(config, self.device)
        if budget is not None:
            plans = [p if p.problem else keep_within(p, budget) for p in plans]
        return max(plans, key=lambda p: (p.device_peak, p.host))

    def plan_rank(self, config: DistConfig, pp_rank: int) -> MemoryPlan:
        """One rank of a pipeline (0 without one) as it is without a `memory_budget`."""
        stages, shards = config.pipeline.stages, axes_of(config, self.world_size).size("shard")
        names: frozenset[str] | None = None
        paths: frozenset[str] | None = None
        holders: dict[str, Any] = {}
        in_flight, is_last = 1, True
        if stages > 1:
            split = self._split(config).plan
            mine = range(pp_rank, split.num_stages, stages)
            names = frozenset(n for s in mine for n in split.names_of(s))
            paths = frozenset(c.module for s in mine for c in split.calls[split.bounds[s] : split.bounds[s + 1]])
            sets = {shared.stages: object() for shared in split.shared}
            holders = {shared.names[0]: sets[shared.stages] for shared in split.shared}
            count = settled(config.gradient_accumulation_steps) or 1
            schedule = make_schedule(config.pipeline.schedule, stages, count, config.pipeline.virtual_stages)
            in_flight = max(simulate(schedule).in_flight[s] for s in mine)
            is_last = split.num_stages - 1 in mine
        states = States.of_model(self.model, config, num_shards=shards, names=names, holders=holders)
        measured = self._activations(config)
        known = isinstance(measured, Activations)
        return MemoryPlan(
            states,
            measured.kept(config, self.workload.checkpointing, paths) if isinstance(measured, Activations) else None,
            in_flight,
            measured.logits(config) if isinstance(measured, Activations) and is_last else 0,
            self._checkpoint_nbytes(states),
            pp_rank,
            "" if known else str(measured),
        )

    def _activations(self, config: DistConfig) -> Activations | str:
        micro = settled(config.train_micro_batch_size_per_gpu) or self.workload.micro
        key = (micro, config.dtype)
        if key not in self._measured:
            try:
                args, batch = self.workload.arguments or ((), text_batch(self.model, micro, self.workload.seq))
                self._measured[key] = measure_activations(self.model, config, batch, args)
            except HfDistError:
                raise
            except Exception as error:  # whatever a model's own code does on meta
                self._measured[key] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return self._measured[key]

    def _split(self, config: DistConfig) -> PlannedSplit:
        pipeline = config.pipeline
        key = (pipeline.stages * pipeline.virtual_stages, pipeline.partition_method)
        if key not in self._splits:
            batch = {k: v for k, v in text_batch(self.model, 1, 32).items() if isinstance(v, torch.Tensor)}
            batch["labels"] = batch["input_ids"]
            self._splits[key] = plan_stages(self.model, batch, key[0], method=pipeline.partition_method)
        return self._splits[key]

    def _checkpoint_nbytes(self, states: States) -> int:
        params = list(self.model.parameters())
        trained = sum(p.numel() for p in params if p.requires_grad)
        return sum(p.numel() * p.element_size() for p in params) + trained * (4 + sum(states.optimizer.elements))
