"""accelerate's `ParallelismConfig` as keys of the JSON: the same sizes, run by this engine.

    cp_size, sp_size                     sequence_parallel_size
    dp_shard_size with dp_replicate      zero_optimization.mics_shard_size (includes the ranks of a sequence)

The `ParallelismConfig` is then removed, because accelerate would require FSDP2 or the deepspeed package. Source: accelerate
1.15 `parallelism_config.py`, and the variables that `accelerate launch --use_parallelism_config` exports.
"""

from __future__ import annotations

import os

from hf_dist.config import DistConfig
from hf_dist.errors import ConfigError, Problem

__all__ = ["given_parallelism", "with_parallelism"]

_SWITCH = "ACCELERATE_USE_PARALLELISM_CONFIG"
_CP, _SHARD = "sequence_parallel_size", "zero_optimization.mics_shard_size"


def given_parallelism(given: object) -> object:
    """The `ParallelismConfig` passed by the script or exported by the launcher, else None. It is hidden from accelerate."""
    if os.environ.get(_SWITCH, "false").lower() == "true":
        from accelerate.parallelism_config import ParallelismConfig

        given = given if given is not None else ParallelismConfig()
        os.environ[_SWITCH] = "false"
    return given


def with_parallelism(config: DistConfig, given: object) -> DistConfig:
    """`config` with the sizes of `given`. Raises `ConfigError` if the file says another size, or the engine lacks the axis."""
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
