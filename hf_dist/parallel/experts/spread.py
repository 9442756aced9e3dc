"""Finds expert modules by their structure, never by class names, and gives each rank its share of the experts.

Stacked experts have an `int` attribute `num_experts`; own parameters that all have it as first dimension, at least one of
them with three dimensions; and a forward of rows, chosen experts and their weights. All experts that transformers itself
can spread (`base_model_ep_plan`) have this structure.
"""

from __future__ import annotations

import inspect

from torch import nn

from hf_dist.dist.mesh import ParallelMesh
from hf_dist.errors import ConfigError, ModelError, Problem
from hf_dist.parallel.experts.exchange import ExpertExchange
from hf_dist.sharding.param_slice import cut_along, held_slice, keep_slice
from hf_dist.tensors.tensor_slice import TensorSlice

__all__ = ["check_experts", "exchanges", "expert_counts", "expert_slices", "find_experts", "spread_experts"]

_KEY = "expert_parallel.autoep_size"


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Modules of stacked experts, by path."""
    return {path: module for path, module in model.named_modules() if _is_experts(module)}


def expert_counts(model: nn.Module) -> list[int]:
    """The distinct numbers of experts of the modules, in order."""
    return sorted({int(module.num_experts) for module in find_experts(model).values()})  # type: ignore[arg-type]


def _is_experts(module: nn.Module) -> bool:
    count = getattr(module, "num_experts", None)
    own = [p for p in module._parameters.values() if p is not None]
    if type(count) is not int or count < 2 or not own or not all(p.dim() > 1 and p.shape[0] == count for p in own):
        return False
    return any(p.dim() == 3 for p in own) and len(inspect.signature(type(module).forward).parameters) == 4


def spread_experts(model: nn.Module, mesh: ParallelMesh, whole: nn.Module | None = None) -> dict[str, TensorSlice]:
    """Keep this rank's share of the experts of `model`, and send tokens to them. Returns the slices of all of them. Local.

    In place, before weights are read and after `check_experts`. Parameters stay the same objects; their first dimension
    becomes that of the share. `whole`: the model before it was cut into stages; experts of other stages are called outside of
    the pipeline's schedule, and tokens are sent to them, too.
    """
    axis = mesh.views["ep"]
    if axis.size == 1:
        return {}
    found = {path: model.get_submodule(path) for path in find_experts(model if whole is None else whole)}
    slices = expert_slices(model, axis.size, axis.rank)
    for name, param in model.named_parameters():
        if name in slices:
            keep_slice(param, slices[name], "ep")
    for module in found.values():
        count: int = module.num_experts // axis.size  # type: ignore[assignment, operator]
        module.num_experts = count  # type: ignore[assignment]
        module.__dict__["forward"] = ExpertExchange(module, axis, count)
    return slices if whole is None else expert_slices(whole, axis.size, axis.rank)


def expert_slices(model: nn.Module, ranks: int, rank: int = 0) -> dict[str, TensorSlice]:
    """The slices that `rank` of `ranks` keeps of the experts' parameters, by name. Slices already cut stay. Local."""
    found: dict[str, TensorSlice] = {
        name: held_slice(p) for name, p in model.named_parameters() if cut_along(p) == "ep"
    }
    own = {id(p): m for m in find_experts(model).values() for p in m._parameters.values() if p is not None}
    for name, param in model.named_parameters() if ranks > 1 else ():
        module = own.get(id(param))
        if module is not None and name not in found:
            count: int = module.num_experts // ranks  # type: ignore[assignment, operator]
            found[name] = TensorSlice.along(tuple(param.shape), 0, (rank * count, (rank + 1) * count))
    return found


def exchanges(model: nn.Module) -> dict[str, ExpertExchange]:
    """The exchanges of the spread experts of `model`, by path; for a pipeline stage only its own."""
    own = ((path, module) for path, module in model.named_modules() if module._parameters)
    found = ((path, module.__dict__.get("forward")) for path, module in own)
    return {path: forward for path, forward in found if isinstance(forward, ExpertExchange)}


def check_experts(model: nn.Module, mesh: ParallelMesh) -> None:
    """Raise `ConfigError` if experts cannot be divided evenly, `ModelError` if they cannot be spread at all. Local."""
    ranks = mesh.axes.size("ep")
    if ranks == 1:
        return
    found = find_experts(model)
    if not found:
        named = sorted({type(m).__name__ for m in model.modules() if "expert" in type(m).__name__.lower()})
        what = f"{', '.join(named[:3])} keeps them in another form than stacks" if named else "it has none"
        raise ModelError(
            f"expert_parallel.enabled is true, but the experts of {type(model).__name__} cannot be spread over ranks: {what}. "
            "Remove the section: ZeRO shards the weights of every model."
        )
    for path, module in found.items():
        count: int = module.num_experts  # type: ignore[assignment]
        if count % ranks:
            divisors = [str(n) for n in range(1, count + 1) if count % n == 0]
            reason = f"does not divide the {count} experts of {path} ({type(module).__name__})"
            raise ConfigError(Problem(_KEY, str(ranks), reason, f"Use one of {', '.join(divisors)}."))
        if any(not p.is_floating_point() for p in module._parameters.values() if p is not None):
            raise ModelError(
                f"the experts of {path} are quantised ({type(module).__name__}), and a share of them cannot be taken: remove "
                "the expert_parallel section, or load the model in bf16."
            )
