"""The axes of a job according to its configuration: the only place where keys become sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hf_dist.config.schema import DistConfig
from hf_dist.config.sections import ZeroConfig
from hf_dist.dist.axes import Axes
from hf_dist.errors import ConfigError, Problem

_HPZ = "zero_optimization.zero_hpz_partition_size"


def axes_of(config: DistConfig, processes: int, *, here: int | None = None, experts: Sequence[int] = ()) -> Axes:
    """Which of `processes` ranks read which rows and hold which parts. Raises `ConfigError` for sizes that do not divide them.

    One copy of the model spans at least `pipeline.stages` x `tensor_parallel.autotp_size` ranks. With
    `expert_parallel.autoep_size` "auto", `here` (processes of one machine) and `experts` (their number, per kind of layer) give
    the size of `ep`, so that its ranks stay on one machine.
    """
    zero = config.zero_optimization
    try:
        sizes: dict[str, Any] = {
            "pp": config.pipeline.stages,
            "shard": config.shard_group_size,
            "tp": config.tensor_parallel.autotp_size,
            "cp": config.sequence_parallel_size,
        }
        axes = Axes.of(processes, **sizes)
        shard = axes.size("shard")
        _check_second_copy(zero, shard)
        spread = config.expert_parallel
        if not spread.enabled:
            return axes
        neighbours = axes.shards_here(here) if here else shard
        size = spread.autoep_size if isinstance(spread.autoep_size, int) else math.gcd(shard, neighbours, *experts)
        return Axes.of(processes, **sizes, ep=size)
    except ConfigError as error:
        raise ConfigError([replace(p, file=config.at_line(p.path)) for p in error.problems]) from None


def _check_second_copy(zero: ZeroConfig, shards: int) -> None:
    """Ranks that share a second copy must divide the ranks of `shard`; as many or more need no second copy, as in DeepSpeed."""
    size = zero.zero_hpz_partition_size
    if zero.stage == 3 and size < shards and shards % size:
        expected = f"is not a divisor of the {shards} ranks that share the weights"
        raise ConfigError(Problem(_HPZ, str(size), expected, f"Use a divisor of {shards}, or remove the key."))
