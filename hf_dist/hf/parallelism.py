"""accelerate's `ParallelismConfig`, as keys of the JSON: the same sizes, of our engine.

    cp_size, sp_size                     sequence_parallel_size
    dp_shard_size beside dp_replicate    zero_optimization.mics_shard_size (of the ranks of a sequence, too)

It is taken away after that: accelerate would ask for FSDP2 or the deepspeed package. Source: accelerate 1.15
`parallelism_config.py`, and what `accelerate launch --use_parallelism_config` exports.
"""

from __future__ import annotations

import os
from typing import Any

from hf_dist.config import DistConfig
from hf_dist.errors import ConfigError, Problem

__all__ = ["given_parallelism", "with_parallelism"]

_SWITCH = "ACCELERATE_USE_PARALLELISM_CONFIG"
_CP, _SHARD = "sequence_parallel_size", "zero_optimization.mics_shard_size"


def given_parallelism(given: Any) -> Any:
    """The `ParallelismConfig` that was passed, or that the launcher exported; None without. accelerate sees neither."""
    if os.environ.get(_SWITCH, "false").lower() == "true":
        from accelerate.parallelism_config import ParallelismConfig

        given = given if given is not None else ParallelismConfig()
        os.environ[_SWITCH] = "false"
    return given


def with_parallelism(config: DistConfig, given: Any) -> DistConfig:
    """`config` with the sizes of `given`. Raises `ConfigError` where the file says another size, or none of ours can be."""
    if given is None:
        return config

    def size(name: str) -> int:
        return int(getattr(given, name, None) or 1)

    wanted: dict[str, tuple[int, str]] = {}
    for name in ("cp_size", "sp_size"):
        if size(name) > 1:
            wanted[_CP] = (size(name), name)
    if size("dp_replicate_size") > 1 and config.zero_optimization.stage == 3:
        among = size("dp_shard_size") * size("cp_size") * size("sp_size")
        wanted[_SHARD] = (among, f"dp_shard_size {size('dp_shard_size')}")
    if size("tp_size") > 1:
        wanted["tensor_parallel.autotp_size"] = (size("tp_size"), "tp_size")
    problems, changes = [], {}
    for path, (value, name) in wanted.items():
        written = config.value_at(path)
        if config.source_of(path) == "file" and written != value:
            expected = f"is not {value}, which parallelism_config asks for ({name})"
            problems.append(Problem(path, str(written), expected, "Keep one of the two.", file=config.at_line(path)))
        changes[path] = (value, f"auto <- parallelism_config.{name.split()[0]}")
    if problems:
        raise ConfigError(problems)
    return config.replaced(changes)
