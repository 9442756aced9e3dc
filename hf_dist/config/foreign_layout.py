"""The layout of another tool, by axis: `keys_of` says which keys of the JSON ask for the same.

tp                 tensor_parallel.autotp_size
pp                 pipeline.stages
cp                 sequence_parallel_size
shard              zero_optimization.stage 3, if the tool shards weights by this size alone
replicate          zero_optimization.mics_shard_size at stage 3: the ranks of one copy, those of a sequence included
ep                 expert_parallel.autoep_size: the ranks of `ep` that are not ranks of `tp`, which cut experts already
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ACCELERATE", "DISTRIBUTED", "ForeignLayout", "keys_of", "whole"]

_ZERO = "zero_optimization"
STAGE = f"{_ZERO}.stage"
SHARES = f"{_ZERO}.mics_shard_size"
SEQUENCE = "sequence_parallel_size"

ACCELERATE: Mapping[str, str] = {
    "tp_size": "tp",
    "cp_size": "cp",
    "sp_size": "cp",
    "dp_shard_size": "shard",
    "dp_replicate_size": "replicate",
}
"""Fields of accelerate's `ParallelismConfig`, and their axes."""
DISTRIBUTED: Mapping[str, str] = {
    "tp_size": "tp",
    "pp_size": "pp",
    "ep_size": "ep",
    "fsdp_size": "shard",
    "dp_replicate_size": "replicate",
}
"""Fields of transformers' `DistributedConfig`, and their axes."""


@dataclass(frozen=True)
class ForeignLayout:
    """Sizes above 1 of the axes that another tool asks for."""

    tool: str
    """The name of the argument or section, for messages."""
    sizes: Mapping[str, tuple[int, str]]
    """Axis -> number of ranks, and the tool's name of that number."""
    options: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    """JSON path -> a value that is no size, and the tool's name of it."""
    shards_weights: bool = False
    """Whether a size of `shard` means that weights are sharded (stage 3)."""
    unused: Mapping[str, str] = field(default_factory=dict)
    """Names that change no result here -> why."""

    @classmethod
    def read(cls, tool: str, given: Mapping[str, object], names: Mapping[str, str], **rest: object) -> ForeignLayout:
        """The sizes of `given` (the tool's names -> values) whose axis `names` tells. `rest`: the other fields."""
        found: dict[str, tuple[int, str]] = {}
        for name, axis in names.items():
            size = whole(given.get(name))
            if size > found.get(axis, (1, ""))[0]:
                found[axis] = (size, name)
        return cls(tool, found, **rest)  # type: ignore[arg-type]

    def size(self, axis: str) -> int:
        """Ranks along `axis`; 1 if the tool does not ask for it."""
        return self.sizes.get(axis, (1, ""))[0]

    @property
    def ranks(self) -> int:
        """Ranks that the layout spans. Those of `ep` are among the others."""
        total = 1
        for axis, (size, _) in self.sizes.items():
            total *= 1 if axis == "ep" else size
        return total


def whole(value: object, otherwise: int = 1) -> int:
    """A size as an int, `otherwise` for None, "auto", 0, -1 and other values that name no number of ranks."""
    text = str(value)
    return int(text) if text.isdigit() and int(text) else otherwise


def keys_of(layout: ForeignLayout, stage: int) -> dict[str, tuple[object, str]]:
    """JSON path -> value, and the tool's name of what asks for it. `stage`: of ZeRO, as the rest of the config has it."""
    keys: dict[str, tuple[object, str]] = {}
    for axis, path in (("cp", SEQUENCE), ("tp", "tensor_parallel.autotp_size"), ("pp", "pipeline.stages")):
        if axis in layout.sizes:
            keys[path] = layout.sizes[axis]
    if layout.shards_weights and "shard" in layout.sizes:
        stage = 3
        keys[STAGE] = (stage, _said(layout, "shard"))
    if "replicate" in layout.sizes and stage == 3:
        keys[SHARES] = (layout.size("shard") * layout.size("cp"), _said(layout, "replicate"))
    spread = layout.size("ep") // layout.size("tp")
    if spread > 1:
        keys["expert_parallel.enabled"] = (True, _said(layout, "ep"))
        keys["expert_parallel.autoep_size"] = (spread, _said(layout, "ep"))
    return keys | dict(layout.options)


def _said(layout: ForeignLayout, axis: str) -> str:
    size, name = layout.sizes[axis]
    return f"{name} {size}"
