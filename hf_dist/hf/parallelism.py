"""Another tool's layout as keys of the JSON: the same sizes, run by this engine.

accelerate's `ParallelismConfig` is removed, because accelerate would require FSDP2 or the deepspeed package. Source: accelerate
1.15 `parallelism_config.py`, and the variables that `accelerate launch --use_parallelism_config` exports.
transformers' `DistributedConfig` comes with a model (`distributed_config.py`).
"""

from __future__ import annotations

import os

from hf_dist.config import DistConfig
from hf_dist.config.foreign_layout import ACCELERATE, SEQUENCE, ForeignLayout, keys_of
from hf_dist.config.values import is_auto, shown
from hf_dist.dist.launch import detect_launch
from hf_dist.errors import ConfigError, Problem

__all__ = ["given_parallelism", "with_layout", "with_parallelism"]

_SWITCH = "ACCELERATE_USE_PARALLELISM_CONFIG"


def given_parallelism(given: object) -> object:
    """The `ParallelismConfig` passed by the script or exported by the launcher, else None. It is hidden from accelerate."""
    if os.environ.get(_SWITCH, "false").lower() == "true":
        from accelerate.parallelism_config import ParallelismConfig

        given = given if given is not None else ParallelismConfig()
        os.environ[_SWITCH] = "false"
    return given


def with_parallelism(config: DistConfig, given: object) -> DistConfig:
    """`config` with the sizes of a `ParallelismConfig`, or of None. Raises as `with_layout`."""
    sizes = {name: getattr(given, name, None) for name in ACCELERATE}
    return with_layout(config, ForeignLayout.read("parallelism_config", sizes, ACCELERATE))


def with_layout(config: DistConfig, layout: ForeignLayout) -> DistConfig:
    """`config` with the sizes of `layout`. Raises `ConfigError` if the file says another size, or the job has too few ranks."""
    problems, changes = [], {}
    for path, (value, name) in keys_of(layout, config.zero_optimization.stage).items():
        written = config.value_at(path)
        if config.source_of(path) == "file" and written != value and not is_auto(written):
            expected = f"is not {shown(value)}, which {layout.tool} asks for ({name})"
            problems.append(Problem(path, shown(written), expected, "Keep one of the two.", file=config.at_line(path)))
        changes[path] = (value, f"layout <- {layout.tool}.{name.split()[0]}")
    result = config.replaced(changes)
    if not problems and layout.shards_weights and layout.size("shard") * layout.size("replicate") > 1:
        problems = _other_number_of_ranks(result, layout)
    if problems:
        raise ConfigError(problems)
    return result


def _other_number_of_ranks(config: DistConfig, layout: ForeignLayout) -> list[Problem]:
    """A layout that says how many ranks shard is one of the whole job, but for axes that the file alone names."""
    processes = detect_launch().world_size
    ranks = layout.size("shard") * layout.size("replicate")
    for path in ("tensor_parallel.autotp_size", "pipeline.stages", SEQUENCE):
        ranks *= int(config.value_at(path))
    if ranks == processes:
        return []
    said = " x ".join(f"{name} {size}" for axis, (size, name) in layout.sizes.items() if axis != "ep")
    fix = f"Start {ranks} processes, or change a size."
    return [
        Problem(layout.tool, said, f"spans {ranks} ranks with the keys of the file, and the job has {processes}", fix)
    ]
