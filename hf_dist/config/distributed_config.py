"""transformers' `DistributedConfig` as a layout: read from its fields, without importing transformers.

Source: transformers 5.23 `distributed/configuration_utils.py`. In 5.12 the class still has the field
`enable_expert_parallel` alone; `from_pretrained` takes `tp_plan` and `tp_size` beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from hf_dist.config.foreign_layout import DISTRIBUTED, ForeignLayout, whole

__all__ = ["distributed_layout", "is_distributed_config"]

_TOOL = "distributed_config"
_OWN_PLANS = "the engine makes its own plan; results are the same for any"
_PLANS: Mapping[str, str] = {
    "tp_plan": "matrices are cut by the model's own plan; tensor_parallel.partition_config changes that",
    "fsdp_plan": "units are found from the model's structure",
    "ep_plan": _OWN_PLANS,
    "ep_implementation": _OWN_PLANS,
    "enable_sequence_parallel": "reserved in transformers; hf_dist.sequence_regions does that",
}
_SAME: tuple[object, ...] = (None, "auto", {}, False)
"""Values that ask for nothing of their own."""
_FIELDS = frozenset({*DISTRIBUTED, *_PLANS, "enable_expert_parallel", "fsdp_cpu_offload", "fsdp_mixed_precision"})
_ZERO = "zero_optimization"


def is_distributed_config(data: Mapping[str, object]) -> bool:
    """Whether `data` is what `DistributedConfig.to_dict` writes: its sizes, and no other key."""
    return (
        bool(data) and data.keys() <= _FIELDS and bool(data.keys() & {"fsdp_size", "tp_size", "enable_expert_parallel"})
    )


def distributed_layout(given: Mapping[str, object], processes: int | None) -> ForeignLayout:
    """The layout of a `DistributedConfig` (field -> value). `processes` of the job, which a `tp_plan` without `tp_size` uses.

    With `processes` None such a plan is listed in `unused`.
    """
    sizes = dict(given)
    if sizes.get("enable_expert_parallel") and "tp_size" not in sizes:
        sizes.setdefault("tp_plan", "auto")  # the class before it had sizes
    unused = {name: why for name, why in _PLANS.items() if sizes.get(name) not in _SAME}
    if sizes.get("tp_size") is None and sizes.get("tp_plan") is not None:
        others = whole(sizes.get("fsdp_size")) * whole(sizes.get("dp_replicate_size")) * whole(sizes.get("pp_size"))
        if processes is None:
            unused["tp_plan"] = "without tp_size: all ranks; set tensor_parallel.autotp_size to their number"
        else:
            sizes["tp_size"] = processes // others
    if sizes.get("enable_expert_parallel") and sizes.get("ep_size") is None:
        sizes["ep_size"] = sizes.get("tp_size")
    if whole(sizes.get("ep_size")) > 1 and whole(sizes.get("ep_size")) == whole(sizes.get("tp_size")):
        unused["ep_size"] = "the ranks of tensor_parallel.autotp_size cut the experts as well"
    options: dict[str, tuple[object, str]] = {}
    if whole(sizes.get("fsdp_size")) > 1 and sizes.get("fsdp_cpu_offload"):
        for section in ("offload_param", "offload_optimizer"):
            options[f"{_ZERO}.{section}.device"] = ("cpu", "fsdp_cpu_offload")
    replicas = whole(sizes.get("fsdp_size")) * whole(sizes.get("dp_replicate_size"))
    if replicas > 1 and sizes.get("fsdp_mixed_precision"):
        options["bf16.enabled"] = (True, "fsdp_mixed_precision")
    return ForeignLayout.read(_TOOL, sizes, DISTRIBUTED, options=options, shards_weights=True, unused=unused)
