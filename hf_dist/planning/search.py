"""Finds the fastest layouts that fit: times all roughly, then plans them in that order until enough different ones fit.

The plan of `planner.py` decides whether a layout fits: states from the layouts that the engine allocates, activations
measured on meta. The search simplifies two things: activations are measured once per number of slices and
scaled by tokens, and pipeline stages have equal numbers of blocks.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from hf_dist.config import DistConfig
from hf_dist.config.refusals import refused
from hf_dist.dist.axes import Axes
from hf_dist.errors import HfDistError, ModelError
from hf_dist.float8.casts import keeps_casts
from hf_dist.float8.convert import planned_layers
from hf_dist.model_config import field, text_config, values
from hf_dist.parallel.experts.spread import expert_counts, expert_slices
from hf_dist.parallel.local_sgd.outer import num_outer_states
from hf_dist.parallel.sequence.split import heads_of
from hf_dist.planning.activations import Activations
from hf_dist.planning.comm_volume import Traffic, state_traffic
from hf_dist.planning.describe_eights import eights_line
from hf_dist.planning.equal_stages import bubble, equal_rank
from hf_dist.planning.expert_traffic import choices
from hf_dist.planning.found import Found
from hf_dist.planning.hardware import Hardware
from hf_dist.planning.layer_traffic import layer_traffic, shared
from hf_dist.planning.layouts import Layout, Shape, Wanted, layouts
from hf_dist.planning.memory_plan import Limits, MemoryPlan
from hf_dist.planning.pipeline_rank import PipelineRank
from hf_dist.planning.planner import Planner, Workload
from hf_dist.planning.rescaled import rescaled
from hf_dist.planning.sliced import EarlySum, merged
from hf_dist.planning.state_bytes import States
from hf_dist.planning.step_time import StepTime, Sum, step_time
from hf_dist.sharding.group_axes import pieces_of
from hf_dist.sharding.placement import Placement, Stay
from hf_dist.sharding.units import find_unit_modules
from hf_dist.sharding.wires import codec_of_products, wires_for
from hf_dist.tensors.codecs import Codec

__all__ = ["MOST_TRIED_OF_AXIS", "Search"]

_TOKENS = 2048
"""Tokens of the row for which activations are measured."""
_DISTINCT = 8
"""Number of different layouts that fit and are compared exactly."""
_MOST_TRIED, MOST_TRIED_OF_AXIS = 400, 200
"""Most plans to try; most plans to try for one axis."""
_CHOSEN = ("pp", "cp", "tp", "ep")
"""Axes that a layout may leave out."""


class Search:
    """The search for one model and one job."""

    def __init__(
        self,
        model: nn.Module,
        config: DistConfig,
        wanted: Wanted,
        limits: Limits,
        hardware: Hardware,
        beside: Callable[[DistConfig, Axes, int], int] = lambda *given: 0,
        *,
        fused: bool | None = None,
    ) -> None:
        """`model` may be on meta; `config`: resolved, for everything that a layout does not decide; `fused`: whether blocks are
        taken to be compiled, by default as `config` says."""
        self.fused = config.compile.enabled if fused is None else fused
        self.fp8 = config.hf_dist.fp8
        self.eights = planned_layers(model, config, expert_counts(model))
        self.model, self.config, self.wanted, self.limits, self.hardware = model, config, wanted, limits, hardware
        self.beside = beside
        self.planner = Planner(model, wanted.ranks, Workload(1, min(_TOKENS, wanted.seq)))
        self.shape = shape_of(model)
        slices = expert_slices(model, max(self.shape.experts, default=1)) if self.shape.experts else {}
        numels = {name: p.numel() for name, p in model.named_parameters()}
        self._experts = sum(numels[name] for name in slices)
        self._dense = sum(numels.values()) - self._experts
        self._ends = self._share_of_ends()
        self._states: dict[object, States] = {}
        self._no_tensors: dict[object, int] = {}
        self._contradicts: dict[object, bool] = {}
        self.tried = 0

    def best(self, count: int = 5) -> list[Found]:
        """The fastest layouts, one for each placement of the model; fewer if fewer fit. Takes seconds to minutes on a CPU."""
        found: dict[tuple[int, ...], Found] = {}
        for layout in self._by_rough_time:
            if layout.place in found:
                continue
            if len(found) == max(count, _DISTINCT) or self.tried == _MOST_TRIED:
                break
            if (one := self.plan(layout)) is not None:
                found[layout.place] = one
        return sorted(found.values(), key=lambda each: each.time.seconds)[:count]

    def best_with(self, **sizes: int | str) -> Found | None:
        """The fastest layout that fits among those with these values, such as `tp=8, pp=8`; None if none fits."""
        return self._first(lambda layout: all(getattr(layout, name) == size for name, size in sizes.items()))

    def of_other_axes(self, found: Sequence[Found]) -> dict[str, Found | None]:
        """For each possible axis that none of `found` uses: the fastest layout with it that fits; None if none was found."""
        found_with: dict[str, Found | None] = {}
        for axis in _CHOSEN:
            if any(getattr(each.layout, axis) > 1 for each in found):
                continue
            asked = functools.partial(_has, axis)
            if any(map(asked, self._by_rough_time)):
                found_with[axis] = self._first(asked, MOST_TRIED_OF_AXIS)
        return found_with

    def _first(self, asked: Callable[[Layout], bool], most: int | None = None) -> Found | None:
        """The first layout that fits among the first `most` that are asked for."""
        for layout in itertools.islice(filter(asked, self._by_rough_time), most):
            if (found := self.plan(layout)) is not None:
                return found
        return None

    def plan(self, layout: Layout) -> Found | None:
        """A layout with its plan and time; None if it does not fit or is impossible."""
        self.tried += 1
        try:
            found = self.planned(layout)
        except HfDistError:
            return None
        return None if found.plan.over(self.limits) else found

    def planned(self, layout: Layout) -> Found:
        """A layout with its plan and time, whether it fits or not. Raises `HfDistError` if it is impossible."""
        plans = [self._memory(layout, rank) for rank in sorted({0, layout.pp - 1})]
        fullest = max(plans, key=lambda plan: (plan.over(self.limits), plan.device_need))
        return Found(layout, fullest, self._time(layout, plans[0].states), self._tokens, self.wanted.ranks)

    def smallest_with(self, **sizes: int | str) -> Found | None:
        """Among layouts with these sizes the one that needs least, whether it fits or not; None if there is none."""
        least: Found | None = None
        for layout in layouts(self.shape, self.wanted):
            asked = {"micro": 1, "virtual": 1, "recomputed": "blocks", **sizes}
            if any(getattr(layout, name) != value for name, value in asked.items()):
                continue
            try:
                found = self.planned(layout)
            except HfDistError:
                continue
            if least is None or found.plan.device_need < least.plan.device_need:
                least = found
        return least

    def timed_by(self, hardware: Hardware, found: Found) -> Found:
        """The same layout on other hardware."""
        other = copy.copy(self)
        other.hardware = hardware
        return other._timed(found)

    def in_bf16(self, found: Found) -> Found:
        """The same layout without products in float8, and without their gathers."""
        other = copy.copy(self)
        other.config = self.config.replaced({"hf_dist.fp8.enabled": (False, "plan")})
        other.fp8, other.eights, other._states = other.config.hf_dist.fp8, None, {}
        return other._timed(found)

    def eights_lines(self, found: Found) -> list[str]:
        """What products in float8 save of a step of `found`; empty without them."""
        if self.eights is None:
            return []
        share = self._activations(_alike(found.layout), exchanges=False).share_in_float8
        line = eights_line("the first one's step", share, found.time.seconds, self.in_bf16(found).time.seconds)
        return [*self.eights.rows(), line]

    def _timed(self, found: Found) -> Found:
        """The same layout, timed as this search does."""
        names = self._rank(found.layout.pp, found.layout.virtual, 0, found.layout.microbatches).names
        states = self._states_of(found.layout, found.layout.of(self.config), 0, names)
        return replace(found, time=self._time(found.layout, states))

    @property
    def _tokens(self) -> int:
        return self.wanted.rows * self.wanted.seq

    # ------------------------------------------------------------------- time

    @functools.cached_property
    def _by_rough_time(self) -> list[Layout]:
        timed: list[tuple[float, int, Layout]] = []
        for layout in layouts(self.shape, self.wanted):
            if self._is_refused(layout) or self.least_nbytes(layout) > (self.limits.device or 1 << 62):
                continue
            try:
                timed.append((self._time(layout).seconds, len(timed), layout))
            except HfDistError:
                continue
        return [layout for _, _, layout in sorted(timed)]

    def least_nbytes(self, layout: Layout) -> int:
        """Rough bytes of states, plus activations kept for one microbatch."""
        numel = self._numel(layout)
        states, shards = layout.placements, layout.dp_shard * layout.cp
        pieces = layout.dp_replicate if layout.over else 1
        sharded = 12 * numel // (shards * pieces if states.optim is Placement.SHARD else 1)
        whole = 0 if states.params is Placement.SHARD and states.stay is not Stay.WINDOW else 2 * numel
        whole += 2 * numel // shards if layout.over and not whole else 0
        if layout.microbatches > 1:  # gradients of earlier microbatches, in half precision at least
            whole += 2 * numel // (shards if states.grads is Placement.SHARD else 1)
        try:
            kept = self._microbatch(_alike(layout)).kept
        except HfDistError:
            return 0
        return sharded + whole + min(layout.microbatches, layout.pp) * kept // layout.pp

    def _is_refused(self, layout: Layout) -> bool:
        """Whether the keys of the layout contradict others of the config, as compiled blocks do stages."""
        key = (
            layout.pp > 1,
            layout.tp > 1,
            layout.cp > 1,
            layout.ep > 1,
            layout.stage,
            layout.virtual > 1,
            layout.over,
        )
        if key not in self._contradicts:
            self._contradicts[key] = any(refused(layout.of(self.config)))
        return self._contradicts[key]

    def _share_of_ends(self) -> float:
        """Share of all weights that are in the first block or before it."""
        blocks = [m for m in find_unit_modules(self.model).values() if not isinstance(m, nn.Embedding)]
        sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
        numel = self._dense + self._experts
        return (sizes[0] + (numel - sum(sizes)) / 2) / numel

    def _numel(self, layout: Layout) -> int:
        """A rank's parameters before ZeRO shards them."""
        # Spread experts are not split as well.
        return (self._dense // layout.tp + self._experts // (layout.ep if layout.ep > 1 else layout.tp)) // layout.pp

    def _time(self, layout: Layout, states: States | None = None) -> StepTime:
        """Uses the first stage's exact `states` if given, otherwise the number of parameters."""
        config = layout.of(self.config)
        axes = self._axes(layout)
        stays = layout.placements.params is not Placement.SHARD or layout.placements.stay is Stay.WINDOW
        microbatch = self._microbatch(_alike(layout), stays and keeps_casts(config))
        if states is not None:
            axes = states.in_blocks(axes)
        weights = self._rough_traffic(layout) if states is None else state_traffic(states.with_config(config), axes)
        traffic = {**weights}
        for axis, own in self._layer_traffic(layout, microbatch).items():
            traffic[axis] = merged(traffic.get(axis, {}), own)
        return step_time(
            microbatch.work.shared(layout.pp),
            traffic,
            axes,
            layout,
            self.hardware,
            bubble=bubble(layout.pp, layout.microbatches, layout.virtual),
            numel=self._numel(layout),
            ends=min(1.0, self._ends * layout.pp),
            early={each: count / layout.pp for each, count in microbatch.early.items()},
        )

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - a search lives as long as the command
    def _microbatch(self, alike: Layout, keeps: bool = False) -> _Microbatch:
        """The cost of a microbatch on one rank in all layers; see `_alike`. `keeps`: a window casts weights once."""
        found, config = self._activations(alike, exchanges=False), alike.of(self.config)
        one = replace(alike, pp=1)
        traffic = layer_traffic(found, self._axes(one), config, microbatches=1, layout=self.planner.layout(config))
        hidden = max(block.input for block in found.blocks)
        work = Sum.of(found, alike.recomputed, self.hardware, fused=self.fused, fp8=self.fp8, keeps=keeps)
        # Products in float8 do not overlap (`parallel/tensor_on_shards.py`).
        early = Counter(each for block in found.blocks for each in block.work.early if not self.fp8.enabled)
        return _Microbatch(work, traffic, found.kept(config).device, hidden, len(found.blocks), early)

    def _layer_traffic(self, layout: Layout, microbatch: _Microbatch) -> Traffic:
        number = layout.microbatches
        traffic = {axis: shared(own, number, layout.pp) for axis, own in microbatch.traffic.items() if axis != "pp"}
        if layout.ep > 1:
            tokens = layout.micro * self.wanted.seq // (layout.cp * layout.tp)
            again = layout.recomputed == "blocks"
            nbytes = tokens * self._visits(layout.dp_shard * layout.cp, layout.ep, again) // _TOKENS
            calls = 4 * microbatch.blocks
            traffic["ep"] = {"all_to_all": (number * calls // layout.pp, number * nbytes // layout.pp)}
        if layout.pp > 1:
            hidden = microbatch.hidden
            traffic["pp"] = {"send": (2 * number * layout.virtual, 2 * number * layout.virtual * hidden)}
        return traffic

    @functools.lru_cache(maxsize=256)  # noqa: B019 - a search lives as long as the command
    def _visits(self, shard: int, ep: int, again: bool) -> int:
        """Bytes that `_TOKENS` tokens of a rank send to experts and back, in all layers."""
        rows = choices(self.model, self.config, shard=shard, here=ep, tokens=_TOKENS, recomputed=again)
        return next(row.tokens for row in rows if row.ep == ep)

    def _rough_traffic(self, layout: Layout) -> Traffic:
        """Traffic of weights and gradients, like `wire.state_traffic`, but from the number of parameters."""
        shards, rounds = layout.dp_shard * layout.cp, layout.rounds
        numel, calls, wires = (
            self._numel(layout),
            max(1, self.shape.blocks // layout.pp),
            wires_for(self.config),
        )
        gathers, reductions = (rounds.forward + rounds.backward, rounds.reductions) if shards > 1 else (0, 0)
        once = numel * (shards - 1) // shards
        whole = 1 if layout.placements.optim is Placement.SHARD else 2
        traffic: Traffic = {
            "shard": {
                "all_gather": (calls * gathers, gathers * self._gathered(once)),
                "reduce_scatter": (calls * reductions, whole * reductions * _sent(wires.gradients, once, 4)),
            }
        }
        if layout.dp_replicate > 1:
            copies = layout.dp_replicate
            every = self.config.local_sgd.every if self.config.local_sgd.enabled else 1
            once = numel * (copies - 1) // (shards * copies)
            if layout.over:
                traffic["dp_replicate"] = {
                    "reduce_scatter": (calls, _sent(wires.copies, once, 4)),
                    "all_gather": (calls, _sent(wires.copies, once, 2)),
                }
            else:
                traffic["dp_replicate"] = {"all_reduce": (calls // every, 2 * _sent(wires.copies, once, 4) // every)}
        return traffic

    def _gathered(self, numel: int) -> int:
        """Bytes of as many weights of the model as they are gathered."""
        weights, products = wires_for(self.config).weights, codec_of_products(self.config)
        if self.eights is None or products is None or weights is not None:
            return _sent(weights, numel, 2)
        own = sum(self.model.get_parameter(name).numel() for name in self.eights.weights)
        share = round(numel * own / (self._dense + self._experts))
        return products.nbytes(share) + 2 * (numel - share)

    # ----------------------------------------------------------------- memory

    def _memory(self, layout: Layout, rank: int) -> MemoryPlan:
        """The plan of one rank of a stage; stages have equal numbers of blocks."""
        config = layout.of(self.config)
        found = self._activations(layout)
        own = self._rank(layout.pp, layout.virtual, rank, min(layout.microbatches, 4 * layout.pp))
        return MemoryPlan(
            self._states_of(layout, config, rank, own.names).with_config(config),
            own.kept(found, config, checkpointing=False),
            own.in_flight,
            found.logits(config) if own.is_last else 0,
            0,
            rank,
            own.travelling(found),
            "",
            self._beside(layout, config, self._holders(layout, rank)),
        )

    def _beside(self, layout: Layout, config: DistConfig, holders: int) -> int:
        """Bytes on the device that belong to no tensor."""
        key = (*layout.place, layout.virtual, holders)
        if key not in self._no_tensors:
            groups = self.planner.groups_of_model(config, holders)
            self._no_tensors[key] = self.beside(config, self._axes(layout), groups)
        return self._no_tensors[key]

    def _states_of(self, layout: Layout, config: DistConfig, rank: int, names: frozenset[str] | None) -> States:
        key = (*layout.place, layout.virtual, rank)
        if key not in self._states:
            slices = self.planner.slices(config)
            states = States.of_model(
                self.model if slices is None else slices.model,
                config,
                num_shards=layout.dp_shard * layout.cp,
                ep=layout.ep,
                names=names,
                copies=slices.copies if slices else None,
                pieces=pieces_of(self._axes(layout), layout.placements.copies),
            )
            outer = num_outer_states(config, layout.dp_replicate)
            states = states.on_machines(self._axes(layout), self.wanted.ranks_per_machine)
            self._states[key] = replace(states, outer_states=outer)
        return self._states[key]

    def _holders(self, layout: Layout, rank: int) -> int:
        """Number of groups shared with other stages: one if an embedding is also the head's weight."""
        tied = field(text_config(getattr(self.model, "config", None)), "tie_word_embeddings", False)
        return int(layout.pp > 1 and bool(tied) and rank in (0, layout.pp - 1))

    @functools.lru_cache(maxsize=256)  # noqa: B019 - a search lives as long as the command
    def _rank(self, pp: int, virtual: int, rank: int, microbatches: int) -> PipelineRank:
        return equal_rank(self.model, pp, virtual, rank, microbatches)

    def _activations(self, layout: Layout, *, exchanges: bool = True) -> Activations:
        config = layout.of(self.config)
        plain = config.replaced({"sequence_parallel_size": (1, "plan"), "train_micro_batch_size_per_gpu": (1, "plan")})
        measured = self.planner.activations(plain, exchanges=exchanges)
        if isinstance(measured, str):
            raise ModelError(measured)
        own = self.wanted.seq // layout.cp
        return self._rescaled(measured, layout.micro, own)

    @functools.lru_cache(maxsize=256)  # noqa: B019 - a search lives as long as the command
    def _rescaled(self, measured: Activations, micro: int, own: int) -> Activations:
        return rescaled(measured, self.planner.workload.seq, rows=micro, own=own, whole=self.wanted.seq)

    def _axes(self, layout: Layout) -> Axes:
        names = ("pp", "dp_replicate", "dp_shard", "tp", "ep")
        return Axes({**{name: getattr(layout, name) for name in names}, "cp_shard": layout.cp})


def shape_of(model: nn.Module) -> Shape:
    """The properties of a model that decide which sizes are possible."""
    heads = heads_of(model)
    blocks = sum(not isinstance(module, nn.Embedding) for module in find_unit_modules(model).values())
    keys = math.gcd(*values(text_config(getattr(model, "config", None)), "num_key_value_heads")) or heads
    return Shape(blocks, heads, int(keys), tuple(expert_counts(model)))


@dataclass(frozen=True)
class _Microbatch:
    """One rank's microbatch, in all layers of the model."""

    work: Sum
    traffic: Traffic
    kept: int
    """Bytes of activations from forward to backward."""
    hidden: int
    """Bytes of the hidden states between two blocks."""
    blocks: int
    early: Mapping[EarlySum, int]
    """Sums over `tp` that begin early -> how many."""


def _sent(codec: Codec | None, numel: int, width: int) -> int:
    """Bytes of `numel` elements, `width` each unless they are encoded."""
    return numel * width if codec is None else codec.nbytes(numel)


def _has(axis: str, layout: Layout) -> bool:
    """Whether the axis has several ranks."""
    return bool(getattr(layout, axis) > 1)


def _alike(layout: Layout) -> Layout:
    """The part of a layout that decides the cost of its microbatches."""
    stages = min(layout.pp, 2)  # whole sequences are sent between stages
    ep = layout.ep if layout.tp > 1 else 1  # spread experts are not split
    return Layout(stages, layout.tp, layout.cp, ep, micro=layout.micro, recomputed=layout.recomputed)
