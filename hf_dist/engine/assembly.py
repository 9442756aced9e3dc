"""The parts of an engine over a sharded model, each made of those above it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from hf_dist.config import BatchSizes, DistConfig, settled
from hf_dist.config.roles import averaging_role, roles_of
from hf_dist.engine.engine import Engine, Losses
from hf_dist.engine.optimizer_step import OptimizerStep
from hf_dist.engine.pipeline_runner import CutModel, Pipeline
from hf_dist.engine.runner import Whole
from hf_dist.engine.window import Loop, Window
from hf_dist.memory.loss import tiled_loss_for
from hf_dist.optim.loss_scale import DynamicLossScaler
from hf_dist.optim.optimizers import Optimizers
from hf_dist.parallel.experts.router_loss import router_loss_for
from hf_dist.parallel.local_sgd.meeting_point import reach
from hf_dist.parallel.local_sgd.outer import OuterOptimizer
from hf_dist.parallel.local_sgd.served import ServedOuter
from hf_dist.parallel.sequence import split_sequence
from hf_dist.parallel.sequence.forward import axis_under_way
from hf_dist.parallel.tensor_on_shards import TensorSplit
from hf_dist.planning.memory_budget import MemoryBudget
from hf_dist.sharding.placement import Placement
from hf_dist.sharding.runtime import ShardedModel
from hf_dist.sharding.tied_views import TiedView, TiedViews

__all__ = ["assemble"]


def assemble(
    sharded: ShardedModel,
    config: DistConfig,
    batch: BatchSizes,
    *,
    cut: CutModel | None,
    tensors: TensorSplit | None,
    views: Sequence[TiedView],
    trainable: bool,
    loop: Loop,
) -> Engine:
    """The engine of `sharded`, without optimizer and schedule. Local, but for splitting sequences: collective over cp.

    `cut`, `tensors`: how the model was cut into stages and along `tp`; `views`: parameters that are the same elements.
    """
    optimizers = Optimizers()
    window = Window(sharded, batch.accumulation, optimizers, loop)
    stepping = OptimizerStep(
        sharded,
        config,
        window,
        optimizers,
        scaler=loop.scaler or _scaler(config) if trainable else None,
        outer=_outer(sharded, config),
        tied_views=TiedViews(views, sharded.groups, sharded.mesh),
    )
    pipeline = None if cut is None else Pipeline(cut, sharded, config.pipeline)
    losses = _losses(sharded, config, batch, pipeline, tensors) if trainable else Losses()
    # After the losses, whose hooks must see whole rows.
    split = split_sequence(sharded.model, sharded.mesh, config.hf_dist.sequence_parallel)
    return Engine(
        sharded=sharded,
        config=config,
        batch=batch,
        window=window,
        stepping=stepping,
        runner=pipeline or Whole(sharded.model, window),
        losses=losses,
        split_sequence=split,
        memory_budget=MemoryBudget.of(config, sharded) if trainable else None,
    )


def _outer(sharded: ShardedModel, config: DistConfig) -> OuterOptimizer | ServedOuter | None:
    """How the replicas of the model meet; None where all ranks train together. Local."""
    if not sharded.trainable_groups:
        return None
    if config.local_sgd.is_served:
        roles = roles_of(config.hf_dist.roles)
        server = averaging_role(roles)
        job = roles[server].address if roles[server].job else None
        return ServedOuter(sharded, config.local_sgd, functools.partial(reach, server, job))
    return OuterOptimizer(sharded, config.local_sgd) if sharded.mesh.replicas is not None else None


def _scaler(config: DistConfig) -> DynamicLossScaler | None:
    return DynamicLossScaler.from_config(config.fp16) if settled(config.fp16.enabled) else None


def _losses(
    sharded: ShardedModel, config: DistConfig, batch: BatchSizes, pipeline: Pipeline | None, tensors: TensorSplit | None
) -> Losses:
    """The tiled loss and the routers' loss, where this rank computes a loss. Local."""
    if pipeline is not None and sharded.mesh.pp.rank != pipeline.last:
        return Losses()
    model = sharded.model
    kept = sharded.root.modules if sharded.placements.params is Placement.SHARD else model.modules()
    tiled = tiled_loss_for(model, set(kept), config, tensors.model.vocabulary if tensors else None)
    router = router_loss_for(model, sharded.mesh, batch.accumulation, config.hf_dist.router_loss, axis_under_way)
    return Losses(tiled, router)
