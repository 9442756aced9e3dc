"""The parts of an engine that a plan reads, and a planner for it. A protocol, because estimates are below the engine."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from hf_dist.config import BatchSizes, DistConfig
from hf_dist.dist.host_info import free_nbytes
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.float8.linear import make_plain
from hf_dist.parallel.pipeline.meta import meta_twin
from hf_dist.planning.overhead import WORKSPACES
from hf_dist.planning.planner import Planner, Workload
from hf_dist.sharding.param_slice import held_slice, mark_cut
from hf_dist.sharding.pickled import copied_as_prepared, copied_without_weights
from hf_dist.sharding.runtime import ShardedModel


class Running(Protocol):
    """A model in training, namely the engine."""

    sharded: ShardedModel
    config: DistConfig
    batch: BatchSizes
    tiled_loss: Any
    """An object with `tiles`, or None."""

    @property
    def pipeline(self) -> Any:
        """An object with the `PlannedSplit` of the model, or None."""

    @property
    def mesh(self) -> ParallelMesh:
        """Axes and ranks."""

    @property
    def device(self) -> torch.device:
        """The device that computes."""

    def resident_nbytes(self) -> dict[str, int]:
        """Bytes stored between steps, by kind of memory."""


def planned_config(engine: Running, micro: int) -> DistConfig:
    """The config with the values known at run time."""
    return engine.config.replaced(
        {
            "train_micro_batch_size_per_gpu": (micro, "plan"),
            "gradient_accumulation_steps": (engine.batch.accumulation, "plan"),
            "hf_dist.tiled_loss": (engine.tiled_loss is not None and (engine.tiled_loss.tiles or None), "plan"),
        }
    )


def planner_for(engine: Running, micro: int, seq: int, *arguments: object) -> Planner:
    """A planner for the engine's model: `micro` samples of `seq` tokens, or the given (args, kwargs)."""
    with copied_as_prepared():
        whole = meta_twin(engine.sharded.whole)
    for twin, param in zip(whole.parameters(), engine.sharded.whole.parameters(), strict=True):
        mark_cut(twin, param)
    make_plain(whole)  # the plan chooses layers for float8, as the engine did
    return _planner(engine, whole, micro, seq, arguments or None)


def planner_alone(engine: Running, micro: int, seq: int) -> Planner:
    """The same on an ordinary model of its structure, in the middle of whatever this rank does. Local: no hook of the live
    model runs, nothing is sent."""
    with copied_without_weights():
        whole = meta_twin(engine.sharded.whole, shape_of=lambda param: held_slice(param).whole)
    return _planner(engine, whole, micro, seq, None)


def _planner(engine: Running, whole: nn.Module, micro: int, seq: int, arguments: Any) -> Planner:
    checkpointing = any(getattr(m, "gradient_checkpointing", False) for m in whole.modules())
    workload = Workload(micro, seq, checkpointing, arguments)
    planner = Planner(whole, engine.mesh.world.size, workload, memory_of(engine))
    if engine.pipeline is not None:
        planner.cut_as(engine.config, engine.pipeline.split)
    return planner


def memory_of(engine: Running) -> int | None:
    """Bytes that this rank's tensors may use on its device, including present ones; None if unknown.

    On a GPU excludes the memory that the context and communicators hold now and that cuBLAS will take. On a CPU the ranks of
    a machine share the available memory.
    """
    free = free_nbytes(engine.device)
    if free is None:
        return None
    if engine.device.type == "cuda":
        return max(0, free + torch.cuda.memory_allocated(engine.device) - WORKSPACES)
    return free + sum(engine.sharded.resident_nbytes().values())
