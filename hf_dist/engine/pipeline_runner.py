"""Runs pipeline stages on sharded weights: a window of microbatches through a schedule, with every ZeRO stage.

Only this file connects `parallel/pipeline/`, which knows nothing of sharding, with `sharding/`, which knows nothing of
schedules. Weights are gathered once per window and kept. Gradients accumulate locally; each unit is reduced inside the last
backward that adds to it.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_dist.config.sections import PipelineConfig
from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis, ParallelMesh
from hf_dist.engine.runner import Step
from hf_dist.engine.window import backward_of
from hf_dist.errors import ModelError
from hf_dist.log import warn_once
from hf_dist.model_config import text_config
from hf_dist.parallel.pipeline import (
    Hooks,
    P2PTransport,
    PlannedSplit,
    Schedule,
    ScheduleRun,
    StagedModel,
    add_communication,
    forward_only,
    make_channels,
    make_schedule,
    plan_stages,
    simulate,
)
from hf_dist.parallel.pipeline.freight import Freight
from hf_dist.parallel.pipeline.meta import meta_twin
from hf_dist.parallel.pipeline.same_batches import compare_batches
from hf_dist.parallel.pipeline.visit import Visits
from hf_dist.sharding.absent import AbsentWeights
from hf_dist.sharding.pipeline_share import PipelineShare
from hf_dist.sharding.precision import Precision
from hf_dist.sharding.prepared import raw_data, set_raw_data
from hf_dist.sharding.runtime import ShardedModel
from hf_dist.sharding.slices import joined
from hf_dist.tensors import pytree
from hf_dist.tensors.checksum import as_bytes

__all__ = ["CutModel", "Example", "Pipeline", "cut_model", "example_of"]

_CHECKED = 8
_CHECK_EVERY = 64
"""On a GPU, comparing batches makes the host wait, so only the first `_CHECKED` windows and every 64th are compared."""


@dataclass(frozen=True)
class Example:
    """A batch like those of training (rank 0's is used), and how training calls the model with it."""

    batch: Callable[[], Mapping[str, object]]
    run: Callable[[nn.Module, Any], object] | None = None


@dataclass(frozen=True)
class CutModel:
    """A model cut into stages, with the parameters of this rank's stages only."""

    split: PlannedSplit
    staged: StagedModel
    share: PipelineShare
    visits: Visits


def cut_model(
    model: nn.Module, config: PipelineConfig, mesh: ParallelMesh, precision: Precision, example: Example
) -> CutModel:
    """Plan the stages and drop the parameters of other ranks' stages from `model`, in place. Collective over world.

    Does not read lazy weights. Raises `ModelError` if the model cannot be split correctly, `TopologyError` for an impossible
    partition.
    """
    # Ranks that planned with different examples would cut in different places, and each would wait for another tensor.
    batch = _shared(mesh, example.batch)
    num_stages = config.stages * config.virtual_stages
    split = plan_stages(model, batch, num_stages, method=config.partition_method, run=example.run)
    # A model that differs between ranks (code that reads the rank) is cut in other places: found here, not in a hang.
    plans = collectives.all_gather_object(mesh.world, (split.plan.bounds, sorted(split.plan.owners.items())))
    if any(plan != plans[0] for plan in plans):
        raise ModelError("the ranks cut the model differently; build it from the same configuration on every rank")
    # Interleaved stages go round the ranks (Megatron-LM): rank r has the stages r, r + size, ...
    stages = tuple(range(mesh.pp.rank, num_stages, mesh.pp.size))
    holders: dict[str, MeshAxis] = {}
    made: dict[tuple[int, ...], MeshAxis] = {}
    for shared in split.plan.shared:
        ranks = tuple(sorted({stage % mesh.pp.size for stage in shared.stages}))
        # Stages of one rank share the parameter itself, and autograd adds up its gradient.
        if len(ranks) == 1:
            continue
        if ranks not in made:
            made[ranks] = mesh.holders(ranks)
        if (
            mesh.pp.rank in ranks
        ):  # a separate axis, and so a separate group: stages may have different shared parameters in a unit
            holders[shared.names[0]] = replace(made[ranks])
    # Before the cut: checkpoints, plans and counts need the names and shapes of all stages.
    whole = meta_twin(model)
    # Weakly: the cut frees what other ranks have. Of one that an optimizer still holds, `name_elsewhere` knows the name.
    references = {name: weakref.ref(p) for name, p in model.named_parameters()}
    visits = Visits(model, split.plan, mesh.pp, precision.compute_dtype)
    # `AbsentWeights` is made before the stages that it asks, and they keep it: one of the two has to be weak.
    running: weakref.ref[StagedModel] | None = None

    def passes_over() -> bool:
        found = None if running is None else running()
        return found is not None and found.passes_over

    absent = AbsentWeights({name: stages[0] for name, stages in split.plan.owners.items()}, passes_over)
    staged = StagedModel(model, split.plan, stages, precision.compute_dtype, visits, absent.mark)
    running = weakref.ref(staged)
    names = [frozenset(split.plan.names_of(stage)) for stage in stages]
    kept = frozenset[str]().union(*names)
    elsewhere = {name: ref for name, ref in references.items() if name not in kept}
    return CutModel(split, staged, PipelineShare(names, holders, elsewhere, whole), visits)


def _shared(mesh: ParallelMesh, make: Callable[[], Mapping[str, object]]) -> Mapping[str, object]:
    """Rank 0's batch on every rank. Collective over world. What fails on rank 0 fails on all, so none waits for the batch."""
    made: Mapping[str, object] | str | None = None
    failure: Exception | None = None
    if mesh.world.rank == 0:
        try:
            made = make()
        except Exception as error:  # whatever a user's loader raises
            failure, made = error, str(error) if isinstance(error, ModelError) else f"rank 0: {error!r}"
    # Also after a failure, which the others learn this way: they are waiting for a batch.
    made = collectives.broadcast_object(mesh.world, made)
    if failure is not None:
        raise failure
    if isinstance(made, str):
        raise ModelError(made)
    assert made is not None
    return made


def example_of(model: nn.Module) -> dict[str, object]:
    """A small batch from an HF model's `dummy_inputs`, with labels for its loss. Local.

    Raises `ModelError` for a model without `dummy_inputs`.
    """
    inputs = dict(getattr(model, "dummy_inputs", None) or {})
    if not inputs:
        raise ModelError(
            f"{type(model).__name__} cannot be cut into pipeline stages without an example of its arguments: pass "
            "example_batch={...} (keyword arguments, one or two rows) to hf_dist.initialize"
        )
    main = getattr(model, "main_input_name", "input_ids")
    if main == "input_ids" and "input_ids" in inputs and "labels" not in inputs:
        config: object = model.config
        per_row = "ForSequenceClassification" in type(model).__name__
        rows = inputs["input_ids"].shape[:1] if per_row else inputs["input_ids"].shape
        inputs["labels"] = torch.zeros(rows, dtype=torch.long)
        inputs["input_ids"] = inputs["input_ids"].clamp(max=max(text_config(config).vocab_size - 1, 0))
    return inputs


def refuse_state_dict(model: nn.Module) -> None:
    """Make `model.state_dict()` raise: it would silently hold a part of the model (and `save_pretrained` write a part)."""

    def refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        # A nested call has a prefix; only the outermost is a user's.
        if not prefix and not keep_vars:  # our own code passes `keep_vars`
            raise ModelError(
                f"{type(module).__name__}.state_dict() on a pipeline rank has only the parameters of its stages. Use "
                "trainer.save_model(), engine.save_checkpoint() or accelerator.get_state_dict(model), which every rank calls."
            )

    model.register_state_dict_pre_hook(refuse)


def _reader_of(sharded: ShardedModel) -> Callable[[str], torch.Tensor]:
    """A function that reads a parameter of this stage for calls outside of the schedule: gathered, and whole except
    experts."""
    units = {slot.name: unit for unit in sharded.units for group in unit.groups for slot in group.layout.slots}

    def read(name: str) -> torch.Tensor:
        unit = units[name]
        unit.unshard()
        unit.wait_unshard()
        group, index = next((g, i) for g in unit.groups for i, slot in enumerate(g.layout.slots) if slot.name == name)
        part = raw_data(group.params[index])
        return joined(group, index, part) if group.share is not None else part

    return read


@torch.no_grad()
def _swap_data(param: nn.Parameter, data: torch.Tensor) -> torch.Tensor:
    before = raw_data(param)
    set_raw_data(param, data)
    return before


class Pipeline:
    """Runs this rank's stages. Every rank of a pipeline makes the same calls with the same microbatches."""

    takes_windows = True

    def __init__(self, cut: CutModel, sharded: ShardedModel, config: PipelineConfig) -> None:
        """Make the channels between stages. Collective over world."""
        self.split = cut.split
        self.sharded = sharded
        self.config = config
        self.mesh = mesh = sharded.mesh
        self.staged = cut.staged
        cut.visits.read_with(_reader_of(sharded), _swap_data, sharded.sliced.use_whole if sharded.sliced else None)
        channels = make_channels(
            mesh.axes.lines("pp"), ring=config.virtual_stages > 1, rank=mesh.world.rank, group_of=mesh.groups.one_of
        )
        self.transport = P2PTransport(channels, mesh.device, Freight(sharded.placements.wires.stages))
        # Now, on all ranks in one order: NCCL connects at the first message, which in the middle of a schedule is a deadlock.
        self.transport.connect()
        refuse_state_dict(sharded.model)
        # HF's training_step calls `accelerator.backward` in the middle of a forward action; the schedule wants it later.
        self._losses: list[torch.Tensor] | None = None  # passed to `backward` while a window runs
        self._schedules: dict[tuple[bool, int], Schedule] = {}
        self._windows = self._evaluations = 0

    @property
    def last(self) -> int:
        """`pp` coordinate of the rank with the last stage, which computes the loss."""
        return (self.split.plan.num_stages - 1) % self.mesh.pp.size

    def schedule(self, num_microbatches: int, train: bool = True) -> Schedule:
        """Every rank's actions for `num_microbatches`, including sends and receives. Local."""
        key = (train, num_microbatches)
        # A last window of an epoch is shorter, and an evaluation has no backward: a few schedules per run, each made once.
        if key not in self._schedules:
            size, virtual = self.mesh.pp.size, self.config.virtual_stages
            if train:
                plain = make_schedule(self.config.schedule, size, num_microbatches, virtual)
                if num_microbatches < size:
                    warn_once(
                        f"{num_microbatches} microbatches per step on {size} pipeline stages: the ranks wait "
                        f"{simulate(plain).bubble:.0%} of the time. Raise gradient_accumulation_steps to at least four times "
                        "the stages."
                    )
            else:
                plain = forward_only(size, num_microbatches, virtual)
            self._schedules[key] = add_communication(plain)
        return self._schedules[key]

    def backward(self, loss: torch.Tensor, loss_scale: float, *, retain_graph: bool) -> None:
        """Pass the loss to the schedule, which differentiates it in its turn. Raises `ModelError` outside of a window."""
        if self._losses is None:
            raise ModelError(
                "pipeline.stages is above 1: backward is part of the schedule. Use engine.train_batch(iterator), or the "
                "Trainer."
            )
        self._losses.append(loss)

    def run_window(self, microbatches: Sequence[object], step: Step, *, loss_scale: float, number: int) -> torch.Tensor:
        """Run the window through the schedule; the sum of `step`'s results, 0D, equal along `pp`. Collective over world."""
        to_differentiate: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        self._losses = to_differentiate

        def function(model: nn.Module, microbatch: object) -> torch.Tensor:
            value = step(model, microbatch)
            values.append(value.detach())
            # The schedule differentiates in its turn, so `step`'s call of `backward` has only left the loss here.
            return to_differentiate.pop()

        try:
            with backward_of(loss_scale):
                self.train(microbatches, function, number)
        finally:
            self._losses = None
        return self.share_loss(values)

    def train(
        self, microbatches: Sequence[object], function: Callable[[nn.Module, object], torch.Tensor], step: int
    ) -> None:
        """Forward and backward of one window; leaves the reduced gradients in the sharded model. Collective over world.

        `function(model, microbatch)` runs the model once and returns the loss to differentiate, already normalised over the
        window. Only the rank of the last stage continues past the model call. `step`: number of the optimizer step, which
        seeds dropout.
        """
        schedule = self.schedule(len(microbatches))
        # Two stages with different microbatches train on rows whose labels belong to others, and nothing else would show it.
        if self._checks():
            compare_batches(self.mesh.pp, microbatches)
        run = ScheduleRun(
            self.staged,
            schedule,
            self.mesh.pp.rank,
            self.transport,
            _ZeroHooks(self.sharded, schedule, self.mesh.pp.rank),
        )
        first = microbatches[0]
        # Before the first action, with the first microbatch: a memory budget plans now, which is a collective over dp.
        self.sharded.passes.begin_training(*(((), first) if isinstance(first, Mapping) else ((first,), {})))
        # Held: between the microbatches of a window a stage's units stay gathered where `Stay.WINDOW` says so.
        with self._random_numbers(step), self.sharded.held():
            run.run(microbatches, function)
        self._windows += 1

    def evaluate(self, batch: object, function: Callable[[nn.Module, object], object]) -> object:
        """The last stage's result of `function(model, batch)`, on every rank of the pipeline, without gradient.

        Collective over pp. Tensors in it (in lists, tuples and dicts) are broadcast; everything else is pickled.
        """
        schedule, rank = self.schedule(1, train=False), self.mesh.pp.rank
        self._evaluations += 1
        if self._checks():
            compare_batches(self.mesh.pp, [batch])
        # The same run as in training, with a schedule that has forwards only: there is no second way through the stages.
        run = ScheduleRun(self.staged, schedule, rank, self.transport, _ZeroHooks(self.sharded, schedule, rank))
        results = run.run([batch], function)
        return self.from_last(results[0])

    def _checks(self) -> bool:
        """Whether batches are compared now; see `_CHECKED`. Equal along pp."""
        count = self._windows + self._evaluations
        return self.mesh.device.type == "cpu" or count <= _CHECKED or count % _CHECK_EVERY == 0

    def share_loss(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of the last stage's `values`, 0D, on every rank of the pipeline. Collective over pp."""
        # float64: the sum of many losses keeps all digits of fp32.
        # The first stages have no loss, and HF logs and compares one on every rank.
        message = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if self.mesh.pp.rank == self.last:
            message.copy_(torch.stack([v.detach().double().reshape(()) for v in values]).sum())
        collectives.broadcast(self.mesh.pp, message, self.last)
        return message.float()

    def from_last(self, value: object) -> object:
        """The last stage's `value`, on every rank of the pipeline. Collective over pp."""
        is_last = self.mesh.pp.rank == self.last
        shapes = pytree.mapped(lambda x: _Tensor(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x, value)
        # Shapes first, as objects; tensors then travel as bytes, in any dtype, without a pickle of their data.
        shapes = collectives.broadcast_object(self.mesh.pp, shapes if is_last else None, self.last)
        own = iter(pytree.leaves(value)) if is_last else None

        def arrive(row: object) -> object:
            leaf = next(own) if own is not None else None
            if not isinstance(row, _Tensor):
                return row
            device = self.mesh.device
            tensor = torch.empty(row.shape, dtype=row.dtype, device=device) if leaf is None else leaf.detach()
            collectives.broadcast(self.mesh.pp, as_bytes(tensor), self.last)
            return tensor

        return pytree.mapped(arrive, shapes)

    @contextmanager
    def _random_numbers(self, step: int) -> Iterator[None]:
        """Seed dropout differently on every stage, then restore the generators: collators need them equal on all ranks."""
        # Of the step as well: a resumed run continues with the dropout that it would have had.
        text = f"{torch.initial_seed()} {step} {self.mesh.pp.rank}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        with torch.random.fork_rng([self.mesh.device] if self.mesh.device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield

    def describe(self) -> list[str]:
        """Lines for the start-up report: schedule, ranks, stages."""
        name, virtual = self.config.schedule, self.config.virtual_stages
        often = f", {virtual} stages per rank" if virtual > 1 else ""
        return [f"{name} on {self.mesh.pp.size} ranks{often}", *self.split.describe().splitlines()]


@dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]
    dtype: torch.dtype


class _ZeroHooks(Hooks):
    """Tells the sharded model which stage runs and which units' gradients a backward completes."""

    def __init__(self, sharded: ShardedModel, schedule: Schedule, rank: int) -> None:
        self.sharded = sharded
        self.numbers = {stage: number for number, stage in enumerate(schedule.stages_of(rank))}
        self.open = set(self.numbers.values())
        """Stages whose last backward is still to come, by position in `kinds`."""

    def before_forward(self, stage: int, microbatch: int) -> None:
        """Select the pass orders of this stage."""
        self.sharded.passes.select(self.numbers[stage])

    def before_backward(self, stage: int, microbatch: int, is_last: bool) -> None:
        """A stage's last backward reduces its units. A unit of several stages waits for the last of their last backwards."""
        number = self.numbers[stage]
        self.sharded.passes.select(number)
        finishing: set[int] = set()
        if is_last:
            self.open.discard(number)
            finishing = set(self.sharded.passes.kinds[number].units)
            # A unit of several stages of this rank (a tied embedding) gets gradients until the last of them is done.
            for other in self.open:
                finishing -= set(self.sharded.passes.kinds[other].units)
        # Before the stage's autograd runs: a split backward runs twice, and neither run sees the beginning of the other.
        self.sharded.passes.begin_backward(finishing)

    def after_backward(self, stage: int, microbatch: int, is_last: bool) -> None:
        """End the backward: units without a gradient also take part in their reductions."""
        self.sharded.passes.end_backward()
