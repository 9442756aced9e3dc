"""Which slice of each parameter a rank keeps: arithmetic on a plan and a model, before anything is split or read.

even      every segment in `size` equal parts
uneven    a vocabulary: parts that differ by one row at most
shared    fewer heads of keys and values than ranks: neighbours keep the same one
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from hf_dist.errors import ModelError
from hf_dist.parallel.tensor.plan import (
    COLUMN,
    EMBEDDING,
    ROW,
    WHOLE_EXPERTS,
    Cut,
    SplitPlan,
    pattern_of,
    stock_name,
    unwrapped,
)
from hf_dist.tensors.tensor_slice import TensorSlice

__all__ = ["Kept", "kept_slices", "refuse_narrow_experts", "sharing_of"]

KEY = "tensor_parallel.autotp_size"
_MOST = 64


@dataclass(frozen=True)
class Kept:
    """The part of one parameter that a rank keeps."""

    held: TensorSlice
    sharing: int = 1
    """Number of neighbouring ranks on the axis that keep the same part."""


def kept_slices(model: nn.Module, plan: SplitPlan, size: int, rank: int) -> dict[str, Kept]:
    """By the full name of each split parameter, each once. Raises `ModelError` for sizes that `size` does not divide."""
    base, prefix = unwrapped(model)
    modules = dict(base.named_modules())
    found: dict[str, Kept] = {}
    _refuse_mixtures(model)
    _refuse_adapters(base, plan)
    for name, param in base.named_parameters():
        cut = _cut_of(name, param, plan)
        if cut is None:
            continue
        part, _, adapter = name.partition(".lora_")
        owner = part if adapter else name.rpartition(".")[0]
        heads = shared_heads(modules, stock_name(owner), plan, size) if cut.segments == (1,) else None
        length = param.shape[cut.dim]
        if heads is not None:
            sharing, width = size // heads, length // heads
            first = rank // sharing * width
            found[prefix + name] = Kept(TensorSlice.along(param.shape, cut.dim, (first, first + width)), sharing)
        else:
            ranges = _ranges(name, length, cut, size, rank)
            found[prefix + name] = Kept(TensorSlice.along(param.shape, cut.dim, *ranges))
    return found


def refuse_narrow_experts(base: nn.Module, plan: SplitPlan, size: int, itemsize: int) -> None:
    """Raise `ModelError` if slices of stacked experts are too narrow for the kernel that multiplies them. Local.

    `torch.nn.functional.grouped_mm`, transformers' default, reads rows of a multiple of 16 bytes. `itemsize`: of a weight.
    """
    for name, param in base.named_parameters():
        cut = plan.params.get(pattern_of(name))
        config = getattr(base.get_submodule(name.rpartition(".")[0]), "config", None)
        if cut is None or param.ndim != 3 or getattr(config, "_experts_implementation", None) != "grouped_mm":
            continue
        width = param.shape[cut.dim] // len(cut.segments)
        fitting = [n for n in range(1, min(width, _MOST) + 1) if width % n == 0 and width // n * itemsize % 16 == 0]
        if width % size == 0 and size not in fitting and fitting:
            raise ModelError(
                f"{KEY}: {size} leaves {width // size} of the {width} features of {name} on a rank, of {itemsize} bytes each, "
                f"and torch's grouped_mm needs a multiple of 16 bytes. Sizes that do: {', '.join(map(str, fitting))}. Or load "
                'the model with experts_implementation="eager"; or spread whole experts (expert_parallel).'
            )


def _refuse_mixtures(model: nn.Module) -> None:
    """Refuse X-LoRA: its classifier scales adapters inside of cut layers, so a rank sees a part of its gradient."""
    for name, module in model.named_modules():
        if type(module).__name__ == "XLoraClassifier":
            raise ModelError(
                f"{KEY}: {name} (X-LoRA) mixes adapters of matrices that are cut, and each rank would have a part of its "
                "gradient. Use ZeRO-3 instead of tensor_parallel."
            )


def _refuse_adapters(base: nn.Module, plan: SplitPlan) -> None:
    """Refuse all adapters except LoRA, because only LoRA's split is known."""
    for name, module in base.named_modules():
        copies = getattr(module, "modules_to_save", None)
        if isinstance(copies, nn.ModuleDict) and pattern_of(stock_name(name)) in plan.modules:
            raise ModelError(
                f"{KEY}: PEFT trains a copy of {name} (modules_to_save), which is cut. Leave it out of modules_to_save, or use "
                "ZeRO-3 instead of tensor_parallel."
            )
        if not hasattr(module, "base_layer") or pattern_of(stock_name(name)) not in plan.modules:
            continue
        style = plan.modules[pattern_of(stock_name(name))]
        if style == WHOLE_EXPERTS:
            continue
        if style not in COLUMN | ROW | EMBEDDING:
            raise ModelError(
                f"{KEY}: adapters on {name}, whose weights are stacked, are not available where they are cut. Leave them out "
                "of target_modules and target_parameters, or spread the experts (expert_parallel), which leaves them whole."
            )
        for short, _ in module.named_parameters():
            if not short.startswith(("base_layer.", "lora_")):
                kind = type(module).__module__.split(".")[-2]
                raise ModelError(
                    f"{KEY}: {kind} adapters ({name}.{short}) are not available on matrices that are cut; LoRA is. Use ZeRO-3 "
                    "instead of tensor_parallel."
                )


def _cut_of(name: str, param: nn.Parameter, plan: SplitPlan) -> Cut | None:
    """The plan's cut of a stock parameter; for an adapter, the cut of the matrix beside it."""
    part, _, rest = name.partition(".lora_")
    if not rest:
        return plan.params.get(pattern_of(stock_name(name)))
    module = pattern_of(stock_name(part))
    style = plan.modules.get(module)
    weight = plan.params.get(f"{module}.weight")
    if weight is None or style is None:
        return None
    kind = rest.partition(".")[0]
    if kind.startswith("embedding") or (kind == "magnitude_vector" and style not in COLUMN):
        what = "an adapter on an embedding" if kind.startswith("embedding") else "DoRA, whose norms run along cut rows,"
        raise ModelError(
            f"{KEY}: {what} is not available for {part}. Leave it out of target_modules, or set use_dora=False."
        )
    if style in COLUMN:
        if kind == "B":
            return Cut(-2 if param.ndim == 2 else -1, weight.segments, weight.uneven)
        return Cut(-1, weight.segments, weight.uneven) if kind == "magnitude_vector" else None
    return Cut(-1) if kind == "A" else None


def _ranges(name: str, length: int, cut: Cut, size: int, rank: int) -> list[tuple[int, int]]:
    if cut.uneven and cut.segments == (1,):
        return [(rank * length // size, (rank + 1) * length // size)]
    total = sum(cut.segments)
    ranges, first = [], 0
    for share in cut.segments:
        part = length * share // total
        if length * share % total or part % size:
            raise ModelError(
                f"{KEY}: {size} does not divide the {part} rows or columns of {name}"
                + (f" (segments {cut.segments} of {length})" if len(cut.segments) > 1 else "")
                + f". Sizes that do: {_divisors(part)}."
            )
        ranges.append((first + rank * part // size, first + (rank + 1) * part // size))
        first += part
    return ranges


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, min(number, _MOST) + 1) if number % n == 0)


def heads_of(module: object) -> tuple[int, str] | None:
    """(elements of one head, where that is stored) of an attention module, if it tells."""
    for attribute in ("head_dim", "attention_head_size", "head_size"):
        value = getattr(module, attribute, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value, attribute
    return None


def shared_heads(modules: Mapping[str, nn.Module], name: str, plan: SplitPlan, size: int) -> int | None:
    """Heads of the projection `name` if there are fewer than ranks, which then share them; None if they divide.

    Raises `ModelError` if neither is possible.
    """
    style = plan.modules.get(pattern_of(name))
    if style != "colwise":
        return None
    parent = modules.get(name.rpartition(".")[0])
    module: object = modules.get(name)
    head = heads_of(parent)
    weight = getattr(getattr(module, "base_layer", module), "weight", None)
    if parent is None or head is None or weight is None or weight.ndim != 2:
        return None
    length = getattr(getattr(module, "base_layer", module), "out_features", 0)
    if not length or length % head[0]:
        return None
    heads = length // head[0]
    if heads % size == 0:
        return None
    if size % heads == 0 and isinstance(getattr(parent, "num_key_value_groups", None), int):
        return heads
    raise ModelError(
        f"{KEY}: {size} ranks cannot share the {heads} heads of {name}. Sizes that divide them: {_divisors(heads)}"
        + (
            "; or a multiple of them, if it divides the heads of the queries."
            if hasattr(parent, "num_key_value_groups")
            else "."
        )
    )


def sharing_of(kept: Mapping[str, Kept]) -> set[int]:
    """Numbers of ranks that share a slice."""
    return {k.sharing for k in kept.values() if k.sharing > 1}
