"""Where the model states rest: the one place that knows what a ZeRO stage is.

    stage   params      grads      optim
    0       REPLICATE   PARTIAL    REPLICATE     plain data parallelism (DDP)
    1       REPLICATE   PARTIAL    SHARD
    2       REPLICATE   SHARD      SHARD
    3       SHARD       SHARD      SHARD         (FSDP)

Source: ZeRO (Rajbhandari et al. 2019, arXiv 1910.02054). Everything else in the package asks a column, never the number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, IntEnum

from hf_dist.config import DistConfig


class Placement(Enum):
    """What one rank of the shard axis holds of a flat tensor."""

    REPLICATE = "replicate"
    """All elements, equal on every rank."""
    PARTIAL = "partial"
    """All elements, but only this rank's contribution to their mean."""
    SHARD = "shard"
    """One of `size` equal intervals."""


class Stay(IntEnum):
    """How long weights that rest sharded are kept once they were gathered: the longer, the fewer gathers."""

    USE = 0
    """Until the forward, or the backward, that reads them is over."""
    BACKWARD = 1
    """From a forward to the end of its backward."""
    WINDOW = 2
    """Until the last backward of the accumulation window is over: one gather for all microbatches."""


@dataclass(frozen=True)
class StatePlacements:
    """How each kind of model state rests between uses."""

    params: Placement
    """Weights in the compute dtype."""
    grads: Placement
    """Gradients between the microbatches of one accumulation window."""
    optim: Placement
    """Master weights, optimizer state, and the gradients that the optimizer reads."""
    stay: Stay = Stay.USE
    """How long gathered weights are kept, of units for which no memory budget has chosen."""
    second: int = 1
    """Neighbouring ranks that keep a second copy of weights that rest sharded between them; 1 for none."""


_R, _P, _S = Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD

ZERO_STAGES: dict[int, StatePlacements] = {
    0: StatePlacements(params=_R, grads=_P, optim=_R),
    1: StatePlacements(params=_R, grads=_P, optim=_S),
    2: StatePlacements(params=_R, grads=_S, optim=_S),
    3: StatePlacements(params=_S, grads=_S, optim=_S),
}


def placements_for(config: DistConfig) -> StatePlacements:
    """The row of the table; a pipeline gathers weights and reduces gradients once per window, others reduce once where asked.

    A pipeline that did both every microbatch would send M times as much inside the schedule's critical path;
    `reshard_per_microbatch` says that memory is worth more. `reduce_once_per_window` says the opposite of the gradients.
    """
    zero = config.zero_optimization
    placements = ZERO_STAGES[zero.stage]
    if placements.params is Placement.SHARD:
        placements = replace(placements, second=zero.zero_hpz_partition_size)
    if config.pipeline.stages > 1 and not config.pipeline.reshard_per_microbatch:
        return replace(placements, grads=Placement.PARTIAL, stay=Stay.WINDOW)
    if config.hf_dist.reduce_once_per_window:
        return replace(placements, grads=Placement.PARTIAL)
    return placements
