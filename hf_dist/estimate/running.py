"""The engine as a plan reads it: what is estimated lies below what is planned with it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from hf_dist.config import BatchSizes, DistConfig
from hf_dist.mesh import ParallelMesh
from hf_dist.sharding.runtime import ShardedModel


class Running(Protocol):
    """A model that is being trained: the engine."""

    sharded: ShardedModel
    config: DistConfig
    batch: BatchSizes
    tiled_loss: Any
    """An object with `tiles`, or None."""

    @property
    def mesh(self) -> ParallelMesh:
        """Axes and ranks."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    def resident_nbytes(self) -> dict[str, int]:
        """Bytes at rest, by kind of memory."""
