"""How each model state is placed between uses: the only module that knows what a ZeRO stage is.

    stage   params      grads      optim
    0       REPLICATE   PARTIAL    REPLICATE     plain data parallelism (DDP)
    1       REPLICATE   PARTIAL    SHARD
    2       REPLICATE   SHARD      SHARD
    3       SHARD       SHARD      SHARD         (FSDP)

Each axis has a row: ranks among which states are sharded that of `zero_optimization.stage`, copies of these (`mics_shard_size`)
row 0, or row 1 with `"hf_dist": {"optimizer_over": "all"}`, which cuts masters and optimizer state further among the copies.

Sources: ZeRO (Rajbhandari et al. 2019, arXiv 1910.02054); row 1 over copies: HFSDP of Megatron-FSDP (NVIDIA 2025). The rest of
the package reads a column, never the stage number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, IntEnum

from hf_dist.config import DistConfig
from hf_dist.sharding.precision import Precision
from hf_dist.sharding.wires import NOTHING_ENCODED, Wires, codec_of_products, wires_for


class Placement(Enum):
    """What one rank of the shard axis holds of a flat tensor."""

    REPLICATE = "replicate"
    """All elements, equal on every rank."""
    PARTIAL = "partial"
    """All elements, but only this rank's contribution to their mean."""
    SHARD = "shard"
    """One of `size` equal intervals."""


class Stay(IntEnum):
    """How long sharded weights stay gathered. Longer means fewer gathers."""

    USE = 0
    """Until the end of the forward or backward that reads them."""
    BACKWARD = 1
    """From a forward to the end of its backward."""
    WINDOW = 2
    """Until the end of the accumulation window's last backward: one gather for all microbatches."""


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
    """How long gathered weights stay, in units for which no memory budget has decided."""
    copies: Placement = Placement.REPLICATE
    """`optim` among the copies of what is sharded: each has all of a shard's masters and optimizer state, or a piece."""
    second: int = 1
    """Number of neighbouring ranks that together keep a second copy of sharded weights; 1 for none."""
    wires: Wires = NOTHING_ENCODED
    """In which codec each kind of message travels."""

    def in_eights(self, precision: Precision) -> frozenset[str]:
        """Names of the weights that travel in float8, because they multiply in it."""
        return precision.float8 if self.wires.products is not None else frozenset()


_R, _P, _S = Placement.REPLICATE, Placement.PARTIAL, Placement.SHARD

ZERO_STAGES: dict[int, StatePlacements] = {
    0: StatePlacements(params=_R, grads=_P, optim=_R),
    1: StatePlacements(params=_R, grads=_P, optim=_S),
    2: StatePlacements(params=_R, grads=_S, optim=_S),
    3: StatePlacements(params=_S, grads=_S, optim=_S),
}


OVER_COPIES: dict[str, int] = {"shard": 0, "all": 1}
"""`hf_dist.optimizer_over` -> the table's row for the axes of copies."""


def placements_for(config: DistConfig) -> StatePlacements:
    """The table row of the configured stage, adapted to pipelines and to `reduce_once_per_window`.

    A pipeline gathers weights and reduces gradients once per window. Once per microbatch would send M times as much on the
    schedule's critical path; `reshard_per_microbatch` chooses that to save memory. `reduce_once_per_window` spends memory on
    unsharded gradients to reduce once.
    """
    zero = config.zero_optimization
    over_copies = ZERO_STAGES[OVER_COPIES[config.hf_dist.optimizer_over]]
    placements = replace(ZERO_STAGES[zero.stage], copies=over_copies.optim, wires=wires_for(config))
    if placements.params is Placement.SHARD:
        wires = replace(placements.wires, products=codec_of_products(config))
        placements = replace(placements, second=zero.zero_hpz_partition_size, wires=wires)
    if config.pipeline.stages > 1 and not config.pipeline.reshard_per_microbatch:
        return once_per_window(placements)
    if config.hf_dist.reduce_once_per_window:
        return replace(placements, grads=Placement.PARTIAL)
    return placements


def once_per_window(placements: StatePlacements) -> StatePlacements:
    """The same where weights are gathered, and gradients reduced, once per accumulation window."""
    return replace(placements, grads=Placement.PARTIAL, stay=Stay.WINDOW)
