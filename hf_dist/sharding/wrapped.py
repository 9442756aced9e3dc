"""Parameters that another library has wrapped: each is named as what it is, with the remedy for that cause."""

from __future__ import annotations

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_dist.errors import ModelError

__all__ = ["refuse_wrapped"]

_NO_FSDP = "Remove that; zero_optimization.stage 3 shards the same."
_SHARDED = "has sharded already, and hf_dist shards whole models"


def refuse_wrapped(model: nn.Module) -> None:
    """Raise `ModelError` for the first parameter of `model` that another library has wrapped. Local."""
    for name, param in model.named_parameters():
        problem = _problem(model, param)
        if problem:
            raise ModelError(f"{name} {problem}")


def _problem(model: nn.Module, param: nn.Parameter) -> str:
    """Why `param` of `model` has no flat shard, and what to do; empty for a tensor of torch's own kind. Local."""
    if _of(param, "FlatParameter") or any(_of(module, "FullyShardedDataParallel") for module in model.modules()):
        return f"belongs to a model that FullyShardedDataParallel (FSDP1) {_SHARDED}. {_NO_FSDP}"
    if not is_traceable_wrapper_subclass(param):
        return ""
    kind, library = type(param).__name__, type(param).__module__.partition(".")[0]
    if library == "torch" and kind == "DTensor":
        return f"is a DTensor, which {_who_sharded(model)}"
    if library == "torchao":
        return (
            f"is a {kind} of torchao (a tensor made of several), which has no flat shard. Train the model as it was before "
            "torchao's quantize_ or TorchAoConfig, and quantise the saved one; or train an adapter on a base in 4 bits "
            "(BitsAndBytesConfig)."
        )
    return (
        f"is a {kind} of {library} (a tensor made of several), which has no flat shard. Prepare the model before {library} "
        "wraps its parameters, or train without a dist_config."
    )


def _who_sharded(model: nn.Module) -> str:
    """Who made DTensors of the parameters, and what does the same here."""
    if any(
        getattr(module, "is_distributed_loading_by_transformers", False)
        or (hasattr(module, "from_pretrained") and getattr(module, "tp_size", None))
        for module in model.modules()
    ):
        return (
            f"transformers {_SHARDED}: from_pretrained was called with a distributed_config (or tp_plan, tp_size) before there "
            "were arguments with a dist_config. Create these first, or start the script with hf_dist.run; then hf_dist follows "
            "the distributed_config."
        )
    if any(_of(module, "FSDPModule") for module in model.modules()):
        return f"fully_shard (FSDP2) {_SHARDED}. {_NO_FSDP}"
    return (
        f"parallelize_module or distribute_tensor {_SHARDED}. Remove the call; tensor_parallel.autotp_size cuts matrices over "
        "ranks."
    )


def _of(thing: object, name: str) -> bool:
    """Whether a class of torch.distributed with this name made `thing`, without importing that package's parts."""
    return any(c.__name__ == name and c.__module__.startswith("torch.distributed") for c in type(thing).__mro__)
