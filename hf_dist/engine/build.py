"""Assembles an engine from a model and a config. The order of the steps matters; comments say why."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
from torch import nn

from hf_dist.config import (
    BatchSizes,
    DistConfig,
    axes_of,
    hidden_size_of,
    load_config,
    resolve_without_trainer,
    settled,
    solve_batch,
)
from hf_dist.config.refusals import refuse
from hf_dist.dist import excepthook, roles, watchdog
from hf_dist.dist.batch_consistency import compare_rows
from hf_dist.dist.host_info import ranks_here
from hf_dist.dist.mesh import DEFAULT_TIMEOUT, ParallelMesh, build_mesh
from hf_dist.engine.assembly import assemble
from hf_dist.engine.ddp_compat import give_ddp_whole_weights
from hf_dist.engine.engine import Engine
from hf_dist.engine.pipeline_runner import CutModel, Example, cut_model, example_of
from hf_dist.engine.report import report_of
from hf_dist.engine.unprepare import taking_over
from hf_dist.engine.window import Loop
from hf_dist.errors import ConfigError, Problem
from hf_dist.float8.casts import keeps_casts
from hf_dist.float8.convert import choose_layers, convert
from hf_dist.float8.linear import plain
from hf_dist.log import say
from hf_dist.memory.activation import set_up_checkpointing
from hf_dist.memory.offload.storage import Storage, open_storage
from hf_dist.optim.build import optimizer_for
from hf_dist.optim.schedules import build_scheduler
from hf_dist.parallel.experts.low_rank import keep_adapters_low_rank
from hf_dist.parallel.experts.spread import check_experts, expert_counts, spread_experts
from hf_dist.parallel.sequence import SplitSequence, as_split
from hf_dist.parallel.tensor_on_shards import TensorSplit, plan_tensors, split_tensors
from hf_dist.planning.optimizer_states import OptimizerStates
from hf_dist.sharding.comm_limits import InFlightLimits
from hf_dist.sharding.compiled import compile_blocks
from hf_dist.sharding.consistency import (
    agree_on_sources,
    check_load,
    check_same_model,
    synchronize_weights,
    tell_full_build,
)
from hf_dist.sharding.fit import check_fit
from hf_dist.sharding.half_buffers import cast_in_forwards
from hf_dist.sharding.placement import placements_for
from hf_dist.sharding.precision import Precision, precision_for
from hf_dist.sharding.quantised import prepare_quantised
from hf_dist.sharding.runtime import ShardedModel
from hf_dist.sharding.tied_views import TiedView, separated

LrScheduler = object
"""An object with `step()`, or a function that makes one from the optimizer."""


def initialize(
    model: nn.Module,
    *,
    config: str | os.PathLike[str] | Mapping[str, object] | DistConfig,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    lr_scheduler: LrScheduler | Callable[[torch.optim.Optimizer], LrScheduler] | None = None,
    device: torch.device | str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    example_batch: Mapping[str, object] | None = None,
) -> Engine:
    """Make an `Engine` for a custom training loop; counterpart of `deepspeed.initialize`.

    Every rank of the job calls it with the same model and config, under any launcher (torchrun, accelerate, mpirun, srun) or
    none. The model is sharded in place and stays the same object. `optimizer`: any torch optimizer over its parameters, or
    several that divide them (`engine.step()` steps all), or None to make the one in the config. `device`: where to train
    (default: the local GPU, else CPU). `timeout`: for every process group. `example_batch`: the model's keyword arguments as in
    training, for `pipeline.stages` above 1 (one or two rows suffice; most HF models need none).
    Raises `ConfigError`, `TopologyError` or `ModelError`.
    """
    excepthook.install()
    read = config if isinstance(config, DistConfig) else load_config(config)
    mesh = mesh_for(read, device=device, timeout=timeout, model=model)
    hidden_size = hidden_size_of(getattr(model, "config", None))
    on_gpu = mesh.device.type == "cuda"
    resolved = resolve_without_trainer(read, data_ranks=mesh.data.size, hidden_size=hidden_size, on_gpu=on_gpu)
    batch = solve_batch(
        settled(resolved.train_batch_size),
        settled(resolved.train_micro_batch_size_per_gpu),
        settled(resolved.gradient_accumulation_steps),
        mesh.data.size,
    )
    example = Example(lambda: dict(example_batch) if example_batch is not None else example_of(model))
    return build_engine(model, resolved, mesh, batch, optimizer=optimizer, lr_scheduler=lr_scheduler, example=example)


def mesh_for(
    config: DistConfig,
    *,
    device: torch.device | str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    model: nn.Module | None = None,
) -> ParallelMesh:
    """Make the mesh that `config` asks for; `model`, if known, settles the expert axis. Collective: every rank calls it.

    Raises `TopologyError` on every rank if their configs differ."""
    refuse(config)  # here, because arguments may have overridden the file
    _refuse_undivided(config)
    mesh = build_mesh(
        axes=functools.partial(
            axes_of, config, here=ranks_here(), experts=() if model is None else expert_counts(model)
        ),
        device=device,
        timeout=timeout,
        facts=_facts(config),
    )
    watchdog.start(config.hf_dist.stall_report_seconds)
    return mesh


def _refuse_undivided(config: DistConfig) -> None:
    if config.hf_dist.roles and roles.place() is None:
        fix = "Start with `-m hf_dist.run --config FILE script.py`, or create a DistAccelerator or DistTrainingArguments first."
        names = ", ".join(config.hf_dist.roles)
        raise ConfigError(Problem("hf_dist.roles", names, "but this process has not entered one of these roles", fix))


def _facts(config: DistConfig) -> dict[str, str]:
    facts: dict[str, str] = {}

    def walk(path: str, node: object) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(f"{path}.{key}" if path else key, value)
        else:
            facts[path] = json.dumps(node)

    walk("", config.model_dump())
    return facts


def in_flight_limits(config: DistConfig) -> InFlightLimits:
    """The limits on elements in flight that `config` sets."""
    zero = config.zero_optimization
    return InFlightLimits(
        prefetch=settled(zero.stage3_prefetch_bucket_size),
        gather=settled(zero.allgather_bucket_size),
        reduce=0 if zero.overlap_comm is False else settled(zero.reduce_bucket_size),
    )


@taking_over
def build_engine(
    model: nn.Module,
    config: DistConfig,
    mesh: ParallelMesh,
    batch: BatchSizes,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    lr_scheduler: LrScheduler | None = None,
    trainable: bool = True,
    example: Example | None = None,
    loop: Loop | None = None,
) -> Engine:
    """Shard `model` and assemble the engine. Collective: every rank calls it with the same model and resolved config.

    `trainable=False`: a frozen model (reference, reward, evaluation only), without gradient or optimizer memory.
    `example`: a sample call of the model, for a pipeline. `loop`: calls the engine (default: a loop of the user's own).
    """
    give_ddp_whole_weights()
    if not isinstance(config.expert_parallel.autoep_size, int):
        source = "auto <- the experts and the ranks of a machine"
        config = config.replaced({"expert_parallel.autoep_size": (mesh.axes.size("ep"), source)})
    if not trainable:
        model.requires_grad_(False)
    else:
        refuse(config)  # before weights are read; by now no value is "auto"
        # Before sharding, so that sharding's hooks stay outside the recomputed part. A split model asks which blocks recompute.
        set_up_checkpointing(model, config)
    check_experts(model, mesh)
    prepare_quantised(model)
    check_fit(model, mesh.dp.size)
    views = _tied_views(model, config)
    check_same_model(model, mesh)  # first: ranks that disagree would hang, or mix each other's weights
    sources = agree_on_sources(model, mesh)
    synchronize_weights(model, mesh)
    tell_full_build(model, mesh)
    precision = precision_for(config, model)
    eights = choose_layers(model, config, mesh.device, expert_counts(model)) if trainable else None
    cut, tensors = _cut(model, config, mesh, precision, example)
    if eights is not None:
        eights = convert(eights, config)
    compare_rows(model, mesh, lambda: tensors is not None and tensors.model.is_whole)  # before sequences are split
    if eights is not None:
        precision = replace(precision, float8=eights.weights)
    sharded = _shard(model, config, mesh, precision, (cut, tensors), _storage_for(model, config, mesh, optimizer))
    if eights is not None and keeps_casts(config):
        for unit in sharded.units:
            unit.keep_casts()
    cast_in_forwards(model, precision)
    if config.hf_dist.check_load:
        check_load(model, sharded.groups, sources, mesh)
    # After sharding: optimizer state is made for fragments, never for whole parameters.
    if optimizer is None and trainable and not (loop and loop.makes_optimizer):
        optimizer = _optimizer_of(model, config)
    engine = assemble(
        sharded, config, batch, cut=cut, tensors=tensors, views=views, trainable=trainable, loop=loop or Loop()
    )
    given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*(optimizer or ())]
    for number, one in enumerate(given):
        engine.attach_optimizer(one, beside=given[:number])
    if engine.split_sequence is not None:
        _verify_split(engine.split_sequence, engine)
    # Last: a schedule reads and writes the param groups that the optimizer will step.
    engine.lr_scheduler = _scheduler(lr_scheduler, config, optimizer)
    for change in _changes:
        change(engine)
    watchdog.watch(engine)
    if trainable:
        say(report_of(engine, tensors, eights))
    return engine


def _tied_views(model: nn.Module, config: DistConfig) -> list[TiedView]:
    """Parameters that are the same elements, now apart. Local. Raises `ConfigError` where a step does not wait for both."""
    views = separated(model)
    if views and config.hf_dist.optimizer_in_backward:
        raise ConfigError(
            Problem(
                "hf_dist.optimizer_in_backward",
                "true",
                f"{' and '.join(views[0].names)} are parameters in the same memory: a step has to change all",
                "Remove it, or make them one parameter (a.weight = b.weight).",
            )
        )
    return views


_changes: list[Callable[[Engine], None]] = []


def after_build(*changes: Callable[[Engine], None]) -> None:
    """From now on call these, in this order, with every new engine: what changes methods of HF's models, unknown here."""
    _changes.extend(change for change in changes if change not in _changes)


def _verify_split(split: SplitSequence, engine: Engine) -> None:
    """Try the model on parts of rows: what differs from the whole is refused when it comes. Collective over the ranks of cp."""
    from hf_dist.parallel.sequence.verify import verify  # imports transformers

    with plain(engine.model):  # compares sums, which rounding would hide
        verify(split, engine.model, engine.evaluate, tries=engine.pipeline is None)


def _cut(
    model: nn.Module, config: DistConfig, mesh: ParallelMesh, precision: Precision, example: Example | None
) -> tuple[CutModel | None, TensorSplit | None]:
    """Cut `model` into stages, spread its experts and cut its matrices, in place, before any weights are read."""
    cut = tensors = None
    # Planned on the whole model, before it is cut into stages.
    plan = plan_tensors(model, config, mesh) if mesh.tp.size > 1 else None
    if mesh.pp.size > 1:  # each rank then loads only its own stages
        example = example or Example(lambda: example_of(model))
        if mesh.cp.size > 1:
            example = replace(example, batch=as_split(model, example.batch))
        cut = cut_model(model, config.pipeline, mesh, precision, example)
        if plan is not None and plan.sequence and cut.split.plan.in_place:
            plan = plan_tensors(model, config, mesh, in_place=True)
    _spread(model, mesh, cut)
    keep_adapters_low_rank(model)
    if plan is not None:  # cuts only this rank's stages
        tensors = split_tensors(model, plan, mesh, config, cut.share.whole if cut else None)
        if cut is not None:
            cut.staged.continues = tensors.model.continues
    return cut, tensors


def _spread(model: nn.Module, mesh: ParallelMesh, cut: CutModel | None) -> None:
    """Distribute experts over ranks, after stages are planned with the stock forward and before weights are read."""
    slices = spread_experts(model, mesh, cut.share.whole if cut else None)
    if cut:
        cut.visits.keep_slices(slices)


def _shard(
    model: nn.Module,
    config: DistConfig,
    mesh: ParallelMesh,
    precision: Precision,
    parts: tuple[CutModel | None, TensorSplit | None],
    storage: Storage,
) -> ShardedModel:
    """Shard `model` into units and install their hooks; compile its blocks if the config says so."""
    leaf = config.zero_optimization.leaf_module
    cut, tensors = parts
    if config.local_sgd.enabled:  # from here on, training communicates only within the replica
        mesh = mesh.one_replica()
    for buffer in model.buffers():
        buffer.data = buffer.data.to(mesh.device)
    sharded = ShardedModel(
        model,
        placements=placements_for(config),
        mesh=mesh,
        precision=precision,
        limits=in_flight_limits(config),
        leaf_modules=(leaf.classes, leaf.names, leaf.name_suffixes),
        pipeline=cut.share if cut else None,
        sliced=tensors.share if tensors else None,
        storage=storage,
    )
    if mesh.device.type == "cuda":  # the allocator still caches the blocks that held full weights
        torch.cuda.empty_cache()
    # After sharding, so that its hooks stay outside the compiled code; before the tiled loss, which calls the blocks.
    if config.compile.enabled:
        say(f"{compile_blocks(sharded.units, config.compile.backend)} blocks are compiled ({config.compile.backend})")
    return sharded


def _optimizer_of(model: nn.Module, config: DistConfig) -> torch.optim.Optimizer | None:
    """The config's `optimizer` over the trainable parameters; None if the config has none."""
    if config.optimizer is None:
        return None
    return optimizer_for(model, config.optimizer.type, config.optimizer.params)


def _storage_for(
    model: nn.Module,
    config: DistConfig,
    mesh: ParallelMesh,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> Storage:
    """The storage of all states, sized for the optimizer's states if the optimizer is known by now."""
    states = OptimizerStates(())
    if optimizer is not None:
        given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        states = max(map(OptimizerStates.of, given), key=lambda one: sum(one.elements))
    elif config.optimizer is not None:
        states = OptimizerStates.of_config(config)
    return open_storage(
        config,
        mesh,
        trained_numel=sum(p.numel() for p in model.parameters() if p.requires_grad),
        total_numel=sum(p.numel() for p in model.parameters()),
        state_nbytes=sum(states.elements),
    )


def _scheduler(given: LrScheduler | None, config: DistConfig, optimizer: object) -> LrScheduler:
    if given is None:
        if config.scheduler is None or optimizer is None:
            return None
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                Problem(
                    "scheduler",
                    config.scheduler.type,
                    "steps one optimizer, and several were given",
                    "Pass lr_scheduler.",
                )
            )
        return build_scheduler(config.scheduler.type, config.scheduler.params, optimizer)
    if callable(given) and not hasattr(given, "step"):
        if optimizer is None:
            raise ConfigError(
                Problem(
                    "lr_scheduler", "", "is a function of the optimizer, but there is none", "Pass optimizer= as well."
                )
            )
        return given(optimizer)
    return given
