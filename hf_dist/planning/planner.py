"""Plans the memory of a job's fullest rank from a config and a meta model: many configs, one model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from hf_dist.config import DistConfig, axes_of, settled
from hf_dist.config.sections import Fp8Config
from hf_dist.dist.axes import RANKS_PER_MACHINE, Axes
from hf_dist.errors import HfDistError
from hf_dist.float8.casts import keeps_casts
from hf_dist.float8.convert import planned_layers
from hf_dist.memory.activation.checkpoint import asks_for_checkpointing
from hf_dist.parallel.experts.spread import expert_counts
from hf_dist.parallel.local_sgd.outer import num_outer_states
from hf_dist.parallel.pipeline import PlannedSplit, make_schedule, plan_stages
from hf_dist.parallel.sequence.layout import SequenceLayout, layout_for
from hf_dist.parallel.sequence.ring_plan import masked_nbytes
from hf_dist.parallel.sequence.split import heads_of
from hf_dist.planning.activations import Activations
from hf_dist.planning.comm_volume import Traffic, state_traffic
from hf_dist.planning.describe_eights import eights_line
from hf_dist.planning.eights import IN_BF16
from hf_dist.planning.expert_traffic import ExpertTraffic, advice, choices
from hf_dist.planning.forms import form_lines
from hf_dist.planning.hardware import Hardware
from hf_dist.planning.layer_traffic import layer_traffic
from hf_dist.planning.memory_plan import MemoryPlan
from hf_dist.planning.pipeline_rank import PipelineRank, cut_rank
from hf_dist.planning.recorder import measure_activations, text_batch
from hf_dist.planning.residency import budget_nbytes, keep_within
from hf_dist.planning.sliced import Sliced, merged, sliced
from hf_dist.planning.state_bytes import States
from hf_dist.planning.step_time import Sum
from hf_dist.sharding.group_axes import pieces_of
from hf_dist.sharding.param_slice import cut_along
from hf_dist.sharding.placement import Placement, placements_for

_FEW_TOKENS = 32


@dataclass(frozen=True)
class Workload:
    """What one rank computes at a time."""

    micro: int
    """Samples per rank and microbatch."""
    seq: int
    """Tokens per sample; a rank has a part of them if sequences are split."""
    checkpointing: bool = False
    """Whether `gradient_checkpointing` of the TrainingArguments is on."""
    arguments: tuple[Sequence[object], Mapping[str, object]] | None = None
    """(args, kwargs) of one model call with a microbatch, without labels, instead of token numbers of that size."""


class Planner:
    """Plans for one model on a number of ranks, under one or many configs. What does not change is measured once."""

    def __init__(
        self,
        model: nn.Module,
        world_size: int,
        workload: Workload,
        device: int | None = None,
        beside: Callable[[DistConfig, Axes, int], int] = lambda *given: 0,
        ranks_per_machine: int = RANKS_PER_MACHINE,
    ) -> None:
        """`model` may be on meta; `world_size` counts all ranks; `device`: bytes of a rank's device, if known; `beside`: bytes
        of it that belong to no tensor, as `overhead.estimated` returns."""
        self.ranks_per_machine = ranks_per_machine
        self.model = model
        self.world_size = world_size
        self.workload = workload
        self.device = device
        self.beside = beside
        self._num_experts = expert_counts(model)
        self._measured: dict[object, Activations | str] = {}
        self._cut: dict[object, Sliced] = {}
        self._splits: dict[object, PlannedSplit] = {}

    def plan(self, config: DistConfig) -> MemoryPlan:
        """The fullest rank under a resolved `config`, with its `memory_budget` used. Raises `ConfigError`, `ModelError`."""
        plans = [self.plan_rank(config, rank) for rank in range(config.pipeline.stages)]
        beside = max(plan.beside for plan in plans)
        budget = budget_nbytes(config, None if self.device is None else max(0, self.device - beside))
        if budget is not None:
            plans = [p if p.problem else keep_within(p, budget) for p in plans]
        return max(plans, key=lambda p: (p.device_need, p.host))

    def plan_rank(self, config: DistConfig, pp_rank: int) -> MemoryPlan:
        """One rank of a pipeline (0 without a pipeline), without a `memory_budget`."""
        axes = self._axes(config)
        own = self._pipeline_rank(config, pp_rank)
        slices = self.slices(config)
        states = States.of_model(
            self.model if slices is None else slices.model,
            config,
            num_shards=axes.size("shard"),
            ep=axes.size("ep"),
            names=own.names,
            holders=own.holders,
            copies=slices.copies if slices else None,
            pieces=pieces_of(axes, placements_for(config).copies),
        )
        states = replace(states, outer_states=num_outer_states(config, axes.size("dp_replicate")))
        states = states.on_machines(axes, self.ranks_per_machine)
        measured = self.activations(config)
        known = measured if isinstance(measured, Activations) else None
        kept = own.kept(known, config, self.workload.checkpointing) if known else None
        if known and kept:
            kept = replace(kept, passing=kept.passing + _masked_nbytes(known, self.layout(config)))
        return MemoryPlan(
            states,
            kept,
            own.in_flight,
            known.logits(config) if known and own.is_last else 0,
            self._checkpoint_nbytes(states),
            own.number,
            own.travelling(known) if known else 0,
            "" if known else str(measured),
            self.beside(config, axes, self.groups_of_model(config, own.num_holders)),
        )

    def _pipeline_rank(self, config: DistConfig, number: int) -> PipelineRank:
        pipeline = config.pipeline
        if pipeline.stages == 1:
            return PipelineRank()
        count = settled(config.gradient_accumulation_steps) or 1
        schedule = make_schedule(pipeline.schedule, pipeline.stages, count, pipeline.virtual_stages)
        return cut_rank(self._split(config), schedule, number)

    def groups_of_model(self, config: DistConfig, holders: int) -> int:
        """A rank's process groups that depend on the model, including the `holders` between pipeline stages."""
        layout, slices = self.layout(config), self.slices(config)
        both_ways = layout is not None and min(layout.ulysses, layout.outer) > 1
        among = set[int]() if slices is None else {n for _, n in slices.copies.values() if 1 < n < slices.size}
        return holders + 2 * both_ways + len(among)

    def traffic(self, config: DistConfig, plan: MemoryPlan | None = None) -> Traffic:
        """What one rank sends in a step, by axis: the rank of `plan`, by default a rank of the fullest stage."""
        axes = self._axes(config)
        found = state_traffic((plan or self.plan(config)).states, axes)
        measured = self.activations(config)
        if isinstance(measured, Activations):
            more = layer_traffic(
                measured,
                axes,
                config,
                microbatches=settled(config.gradient_accumulation_steps) or 1,
                layout=self.layout(config),
                checkpointing=self.workload.checkpointing,
            )
            found |= {axis: merged(found.get(axis, {}), own) for axis, own in more.items()}
        return found

    def layout(self, config: DistConfig) -> SequenceLayout | None:
        """How ranks share sequences."""
        if config.sequence_parallel_size == 1:
            return None
        heads, cut = heads_of(self.model), config.tensor_parallel.autotp_size
        return layout_for(
            config.sequence_parallel_size, heads // math.gcd(heads, cut), config.hf_dist.sequence_parallel
        )

    def expert_lines(self, config: DistConfig) -> list[str]:
        """Bytes that the model's experts send for every possible `ep`; empty without experts."""
        rows, tokens = self._expert_rows(config)
        return advice(rows, self._axes(config).size("ep"), tokens)

    def eights_lines(self, config: DistConfig) -> list[str]:
        """Which layers multiply in float8, and what that saves of a microbatch of all layers; empty without them."""
        choice, found = planned_layers(self.model, config, self._num_experts), self.activations(config)
        if choice is None or isinstance(found, str):
            return choice.rows() if choice is not None else []
        keeps = keeps_casts(config) and placements_for(config).params is not Placement.SHARD
        number = settled(config.gradient_accumulation_steps) or 1
        on = self.workload.checkpointing or asks_for_checkpointing(config)[0]
        again = "selective" if config.activation_checkpointing.selective else "blocks" if on else "nothing"

        def seconds(fp8: Fp8Config, *, fused: bool) -> float:
            work = Sum.of(found, again, Hardware(), fused=fused, fp8=fp8, keeps=keeps)
            return work.forward + work.backward + work.again + work.window / number

        fp8, compiled = config.hf_dist.fp8, config.compile.enabled
        may_compile = not compiled and config.pipeline.stages == config.tensor_parallel.autotp_size == 1
        fused = seconds(fp8, fused=True) if may_compile else None
        times = seconds(fp8, fused=compiled), seconds(IN_BF16, fused=compiled)
        return [*choice.rows(), eights_line("a microbatch", found.share_in_float8, *times, fused)]

    def form_lines(self, config: DistConfig, plan: MemoryPlan) -> list[str]:
        """Which messages are encoded; empty if none is."""
        return form_lines(plan.states, self._axes(config))

    def expert_nbytes(self, config: DistConfig) -> int:
        """Bytes of tokens that a rank sends to experts and back in a step, if all experts are chosen alike."""
        rows, _ = self._expert_rows(config)
        each = next((row.tokens for row in rows if row.ep == self._axes(config).size("ep")), 0)
        return each * (settled(config.gradient_accumulation_steps) or 1)

    def _expert_rows(self, config: DistConfig) -> tuple[list[ExpertTraffic], int]:
        """An entry for every possible `ep`, and the tokens of a rank's microbatch."""
        axes = self._axes(config)
        tokens = (settled(config.train_micro_batch_size_per_gpu) or self.workload.micro) * self.workload.seq
        tokens = -(-tokens // axes.size("cp"))
        rows = choices(
            self.model,
            config,
            shard=axes.size("shard"),
            here=axes.shards_here(min(self.world_size, self.ranks_per_machine)),
            tokens=tokens,
            recomputed=self.workload.checkpointing or asks_for_checkpointing(config)[0],
            tp=axes.size("tp"),
        )
        return rows, tokens

    def _axes(self, config: DistConfig) -> Axes:
        here = min(self.world_size, self.ranks_per_machine)
        return axes_of(config, self.world_size, here=here, experts=self._num_experts)

    def slices(self, config: DistConfig) -> Sliced | None:
        """What a rank holds if matrices are split and the model is still whole; otherwise None."""
        size = config.tensor_parallel.autotp_size
        if size == 1 or any(cut_along(p) == "tp" for p in self.model.parameters()):
            return None
        spread = self._axes(config).size("ep") > 1
        in_place = config.pipeline.stages > 1 and self._split(config).plan.in_place
        key = (size, config.hf_dist.sequence_regions, in_place, spread)
        if key not in self._cut:
            self._cut[key] = sliced(self.model, config, spread=spread, in_place=in_place)
        return self._cut[key]

    def activations(self, config: DistConfig, *, exchanges: bool = True) -> Activations | str:
        """Activations of one microbatch of a rank, or the reason why there are none.

        `exchanges`: with what sending rows to spread experts keeps and computes.
        """
        micro = settled(config.train_micro_batch_size_per_gpu) or self.workload.micro
        seq = -(-self.workload.seq // config.sequence_parallel_size)
        slices = self.slices(config)
        ep = self._axes(config).size("ep") if exchanges else 1
        fp8 = config.hf_dist.fp8
        key = (micro, seq, config.dtype, id(slices), ep, fp8.skip if fp8.enabled else None)
        if key not in self._measured:
            try:
                args, batch = self.workload.arguments or ((), text_batch(self.model, micro, seq))
                args, batch = tree_map(lambda x: _own_positions(x, self.workload.seq, seq), (args, batch))
                self._measured[key] = measure_activations(self.model, config, batch, args, slices, ep)
            except HfDistError:
                raise
            except Exception as error:  # whatever a model's own code raises on meta
                self._measured[key] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return self._measured[key]

    def cut_as(self, config: DistConfig, split: PlannedSplit) -> None:
        """Take `split`, which a job has made, for the stages of this `config`."""
        self._splits[self._cut_key(config)] = split

    def _cut_key(self, config: DistConfig) -> tuple[int, Any, bool]:
        pipeline = config.pipeline
        recompute = self.workload.checkpointing or asks_for_checkpointing(config)[0]
        return pipeline.stages * pipeline.virtual_stages, pipeline.partition_method, recompute

    def _split(self, config: DistConfig) -> PlannedSplit:
        """The stages as a job cuts them: balanced for its rows and its recomputation."""
        key = self._cut_key(config)
        if key not in self._splits:
            rows = text_batch(self.model, 1, self._tokens())
            batch = {k: v for k, v in rows.items() if isinstance(v, torch.Tensor)}
            batch["labels"] = batch["input_ids"]
            self._splits[key] = plan_stages(self.model, batch, key[0], method=key[1], recompute=key[2])
        return self._splits[key]

    def _tokens(self) -> int:
        """Tokens of a sample, as many as the model has positions; a few if only the given arguments tell them."""
        longest = getattr(getattr(self.model, "config", None), "max_position_embeddings", None)
        tokens = self.workload.seq or _FEW_TOKENS
        return min(tokens, longest) if isinstance(longest, int) else tokens

    def _checkpoint_nbytes(self, states: States) -> int:
        params = list(self.model.parameters())
        trained = sum(p.numel() for p in params if p.requires_grad)
        return sum(p.numel() * p.element_size() for p in params) + trained * (4 + sum(states.optimizer.elements))


def _own_positions(value: Any, whole: int, own: int) -> object:
    """A tensor over `whole` positions, reduced to one rank's number of positions."""
    is_split = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == whole > own
    return value[:, :own] if is_split else value


def _masked_nbytes(measured: Activations, layout: SequenceLayout | None) -> int:
    """Of the largest masked tile in a ring whose rows are packed or padded."""
    if layout is None or not layout.is_ring:
        return 0
    calls = [call for block in measured.blocks for call in block.work.attention]
    chunks = [call.length * layout.ulysses // 2 for call in calls]  # exchanged heads for positions
    each = [
        masked_nbytes(call.rows, -(-call.heads // layout.ulysses), chunk, call.widths // 2)
        for call, chunk in zip(calls, chunks, strict=True)
    ]
    return max(each, default=0)
