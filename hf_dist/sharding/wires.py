"""In which codec the messages of a run travel: a column of the placement table, one entry a kind of message.

    weights      gathers of the shards' ranks: a parameter is rounded in its dtype of use, the masters never see it
    gradients    reductions of the shards' ranks (at stage 0: of all)
    copies       between copies of a shard (HSDP): gradients, and weights if the optimizer is sharded over all copies
    meetings     movements of replicas that train alone (`local_sgd`)
    stages       hidden states and their gradients between pipeline stages
    momentum     what an optimizer sends in place of gradients (`optim/compressed.py`), always with error feedback

An axis of one rank sends nothing, so nothing is rounded there. Blocks begin at parameters, whatever the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hf_dist.config import DistConfig
from hf_dist.config.one_bit_refusals import sends_momentum
from hf_dist.dist.axes import Axes
from hf_dist.dist.low_rank import LowRank
from hf_dist.sharding.layout import ALIGNMENT
from hf_dist.tensors.codecs import Codec, Float8Products, Signs, codec_of

__all__ = ["NOTHING_ENCODED", "WHOLE", "GroupWires", "Wires", "codec_of_products", "is_usual", "wires_for"]


@dataclass(frozen=True)
class GroupWires:
    """The codecs of one flat group on one rank; None: numbers are sent as they are."""

    weights: Codec | None = None
    gradients: Codec | None = None
    copies: Codec | None = None
    momentum: Codec | None = None
    second: bool = False
    """Whether a second copy of the weights is kept as it arrived, encoded."""
    of_products: bool = False
    """Whether `weights` rounds as the products that read them do. Then passes compute what they would without it, whoever else
    reads the weights (`gathered`) gets them whole, and the encoded shard is kept until the weights change."""
    low_rank: LowRank | None = None
    """Gradients that travel in factors (PowerSGD), in place of a codec."""


@dataclass(frozen=True)
class Wires:
    """The codecs of a run, by kind of message; None: numbers are sent as they are."""

    weights: Codec | None = None
    frozen: Codec | None = None
    """Of gathers of weights that are not trained."""
    products: Codec | None = None
    """Of gathers of weights that multiply in float8, unless `weights` or `frozen` says otherwise."""
    gradients: Codec | None = None
    copies: Codec | None = None
    meetings: Codec | None = None
    stages: Codec | None = None
    low_rank: LowRank | None = None
    """Gradients that travel in factors (PowerSGD), in place of a codec."""
    momentum: Codec | None = None
    second: bool = True
    """Whether a second copy of encoded weights (`zero_hpz_partition_size`) is kept encoded."""
    feedback: bool = False
    """Whether a reduction adds what its last message has left out."""
    machine: int = 0
    """Adjacent ranks that add up gradients among themselves before others; 0: those of a machine."""

    @property
    def keeps(self) -> bool:
        """Whether something stays between two messages, which a checkpoint has."""
        return self.feedback or self.low_rank is not None or self.momentum is not None

    @property
    def alignment(self) -> int:
        """Multiple of elements at which parameters and shards begin, so that no block has elements of two."""
        of_groups = (
            self.weights,
            self.frozen,
            self.products,
            self.gradients,
            self.copies,
            self.meetings,
            self.momentum,
        )
        return max([ALIGNMENT, *(codec.block for codec in of_groups if codec is not None)])

    def near(self, axes: Axes, ranks_per_machine: int) -> int:
        """Adjacent ranks of `shard` that add up gradients among themselves before others, on machines of so many ranks each;
        1: one hop. As `ParallelMesh.hops` makes them."""
        if self.gradients is None:
            return 1
        shards = axes.size("shard")
        size = self.machine or axes.adjacent("shard", [rank // ranks_per_machine for rank in range(axes.world)])
        return size if 1 < size < shards and shards % size == 0 else 1

    def of_group(
        self, *, trainable: bool, gathers: bool, reduces: bool, usual: bool, multiplied: bool = False
    ) -> GroupWires:
        """What holds for one group. `gathers`: several ranks gather its weights; `reduces`: several ranks reduce its gradient;
        `usual`: it computes in the dtype of the run, not in one that the model's author asks for, or packed;
        `multiplied`: its weights multiply in float8."""
        momentum = self.momentum if trainable and reduces else None  # in fp32, whatever the weights' dtype of use
        if not usual:
            return GroupWires(momentum=momentum)
        gathered = (self.weights if trainable else self.frozen) if gathers else None
        of_products = multiplied and gathers and gathered is None and self.products is not None
        if of_products:
            gathered = self.products
        return GroupWires(
            weights=gathered,
            gradients=self.gradients if trainable and reduces else None,
            copies=self.copies if trainable else None,
            momentum=momentum,
            second=self.second and gathered is not None,
            of_products=of_products,
            low_rank=self.low_rank if trainable and reduces else None,
        )


WHOLE = GroupWires()
"""Nothing is encoded."""


NOTHING_ENCODED = Wires()
"""Every number is sent as it is."""


def wires_for(config: DistConfig) -> Wires:
    """The codecs that the config asks for, in our words or in those of ZeRO++."""
    zero, own = config.zero_optimization, config.hf_dist.wires
    gradients = own.gradients or ("int4" if zero.zero_quantized_gradients else None)

    factors = own.powersgd
    low_rank = LowRank(
        factors.rank,
        factors.start_step,
        factors.error_feedback,
        factors.warm_start,
        factors.min_compression_rate,
    )

    def one(name: str | None) -> Codec | None:
        return codec_of(name, own.block)

    named = Wires(copies=one(own.copies), meetings=one(own.meetings), stages=one(own.stages))
    return replace(
        named,
        weights=one(own.weights or ("int8" if zero.zero_quantized_weights else None)),
        frozen=one(own.frozen_weights or ("int8" if zero.zero_quantized_nontrainable_weights else None)),
        gradients=one(None if gradients == "powersgd" else gradients),
        low_rank=low_rank if gradients == "powersgd" else None,
        momentum=one(Signs.name) if sends_momentum(config) else None,
        second=own.second_copy == "encoded",
        feedback=own.error_feedback,
        machine=own.machine if isinstance(own.machine, int) else 0,
    )


def codec_of_products(config: DistConfig) -> Codec | None:
    """The codec of weights that multiply in float8; None if none do, or if the config wants them to travel whole."""
    fp8 = config.hf_dist.fp8
    return Float8Products(config.hf_dist.wires.block) if fp8.enabled and fp8.gathers == "float8" else None


def is_usual(dtype: torch.dtype, compute: torch.dtype) -> bool:
    """Whether weights in `dtype` are encoded: those of the run's dtype `compute`, not packed ones, nor those kept in fp32."""
    return dtype == compute and dtype.is_floating_point
