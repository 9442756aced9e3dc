"""Which parameters of a model are split, and where activations cross: plain data, by names in which `*` stands for any number.

Module styles have the names that transformers uses in a model's `tp_plan`:

    colwise                 input R, output V: the products of q, k, v, gate, up
    rowwise                 input V, output P and summed: o, down
    colwise_gather_output   the same with gathered output (a head; `colwise_rep`)
    rowwise_split_input     input I, each rank takes its columns (`rowwise_rep`)
    embedding_rowwise       a part of the vocabulary, summed;  embedding_colwise: a part of each row, gathered
    packed_colwise          two or more products in one weight, each split by itself; packed_rowwise
    moe_tp_experts          hidden states and routing weights R, output P
    moe_whole_experts       not split, each rank computes a part of the rows (`whole_experts.py`); hf_dist's own name
    mla_kv_a_proj           DeepSeek's compressed keys, whose rotary part is shared by all heads
    moe_identity_expert, all_reduce, replicated_with_grad_allreduce, local_params, replicate
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from hf_dist.errors import ModelError

__all__ = [
    "Cut",
    "SplitPlan",
    "column_dim",
    "pattern_of",
    "plan_of_model",
    "stock_name",
    "unwrapped",
    "with_whole_experts",
]

COLUMN = frozenset({"colwise", "colwise_gather_output", "colwise_rep"})
ROW = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
EMBEDDING = frozenset({"embedding_rowwise", "embedding_colwise"})
WHOLE_EXPERTS = "moe_whole_experts"
_IN_MODULES = frozenset(
    {"moe_tp_experts", "moe_identity_expert", "mla_kv_a_proj", "all_reduce", "local_params", "replicate"}
)
_PEFT = re.compile(r"\.base_layer(?=\.|$)|\.original_module(?=\.|$)|\.modules_to_save\.[^.]+(?=\.|$)")


@dataclass(frozen=True)
class Cut:
    """How one parameter is split."""

    dim: int
    """Counted from the end: -1 is the last."""
    segments: tuple[int, ...] = (1,)
    """Parts along the dimension that are split separately (q, k, v; gate, up), as shares of the whole."""
    uneven: bool = False
    """Whether ranks may have slices of different sizes (a vocabulary)."""


@dataclass(frozen=True)
class SplitPlan:
    """Names are those of the stock model, with `*` for numbers."""

    params: Mapping[str, Cut] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    """Name -> style."""
    summed: frozenset[str] = frozenset()
    """Whole parameters for which each rank has a part of the gradient."""
    divided: frozenset[tuple[str, str]] = frozenset()
    """(module, attribute): head counts and widths that a module's code reads and that are divided over the ranks."""
    sequence: bool = False
    """Whether blocks keep their activations as parts of the sequence (`sequence.py`)."""
    source: str = ""
    """The origin of the plan, in words."""


def pattern_of(name: str) -> str:
    """`name` with `*` for each part that is a number."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def unwrapped(model: nn.Module) -> tuple[nn.Module, str]:
    """The stock model inside PEFT's wrapper, and the prefix of its names."""
    base = getattr(model, "get_base_model", None)
    if base is None or not hasattr(model, "peft_config"):
        return model, ""
    inner = base()
    prefix = next((name for name, module in model.named_modules() if module is inner), "")
    return inner, f"{prefix}." if prefix else ""


def stock_name(name: str) -> str:
    """The name, in the model without adapters, of a name in the model with adapters."""
    return _PEFT.sub("", name)


def column_dim(module: nn.Module) -> int:
    """The dimension of a module's matrix for its outputs: the first in nn.Linear, the last in GPT-2's Conv1D."""
    return -1 if _is_transposed(module) else -2


def row_dim(module: nn.Module) -> int:
    """The dimension of a module's matrix for its inputs."""
    return -2 if _is_transposed(module) else -1


def _is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def named_matrices(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """(stock name of the module, module, parameter name in it, parameter), including aliases of tied parameters."""
    for name, module in model.named_modules(remove_duplicate=False):
        for short, param in module.named_parameters(recurse=False):
            yield stock_name(name), module, short, param


def plan_of_model(model: nn.Module) -> SplitPlan:
    """The `tp_plan` from the model's author; a plan without rules if there is none. `model`: without PEFT's wrapper.

    Raises `ModelError` for an unknown style.
    """
    found: Mapping[str, str] = dict(getattr(model, "tp_plan", None) or {})
    params: dict[str, Cut] = {}
    modules: dict[str, str] = {}
    summed: set[str] = set()
    for name, module, short, param in named_matrices(model):
        own = pattern_of(name)
        style = found.get(own)
        if style is not None:
            modules[own] = style
        full = f"{own}.{short}" if own else short
        style = found.get(full, style)
        if style == "replicated_with_grad_allreduce":
            summed.add(full)
        elif style is not None:
            cut = _cut(full, style, module, short, param)
            if cut is not None:
                params[full] = cut
    for name, _ in model.named_modules():  # modules without parameters of their own
        own = pattern_of(stock_name(name))
        if own in found:
            modules[own] = found[own]
    plan = SplitPlan(params, modules, frozenset(summed), source=f"tp_plan of {type(model).__name__}")
    return _with_tied_embedding(model, plan)


def with_whole_experts(plan: SplitPlan, experts: Iterable[str]) -> SplitPlan:
    """`plan` without its rules for the experts at these paths: each rank has them whole, and computes a part of the rows."""
    apart = {pattern_of(path) for path in experts}
    if not apart:
        return plan
    inside = tuple(f"{pattern}." for pattern in apart)
    params = {name: cut for name, cut in plan.params.items() if not name.startswith(inside)}
    styles = {name: style for name, style in plan.modules.items() if not name.startswith(inside)}
    return replace(
        plan,
        params=params,
        modules={**styles, **dict.fromkeys(apart, WHOLE_EXPERTS)},
        summed=frozenset(name for name in plan.summed if not name.startswith(inside)),
        divided=frozenset(row for row in plan.divided if row[0] not in apart),
    )


def _cut(full: str, style: str, module: nn.Module, short: str, param: nn.Parameter) -> Cut | None:
    is_vector = param.ndim == 1
    if style in COLUMN:
        return Cut(-1 if is_vector else column_dim(module), uneven=style in GATHERED)
    if style in ROW:
        return None if is_vector else Cut(row_dim(module))
    if style == "packed_colwise":
        return Cut(-1 if is_vector else column_dim(module), (1, 1))
    if style == "packed_rowwise":
        return None if is_vector else Cut(-1, (1, 1))
    if style in EMBEDDING:
        return Cut(-2, uneven=True) if style == "embedding_rowwise" else Cut(-1)
    if style in _IN_MODULES:
        return None
    raise ModelError(f"the plan names a style for {full} that is not known here: {style!r}")


def _with_tied_embedding(model: nn.Module, plan: SplitPlan) -> SplitPlan:
    """A plan may name a tied head but not the embedding; the single weight is then split for both."""
    embedding, head = output_and_input(model)
    names = {id(module): pattern_of(stock_name(name)) for name, module in model.named_modules()}
    if embedding is None or head is None or getattr(head, "weight", None) is not getattr(embedding, "weight", 0):
        return plan
    inside, outside = names.get(id(embedding)), names.get(id(head))
    if inside is None or inside in plan.modules or plan.modules.get(outside or "") not in COLUMN:
        return plan
    params = {**plan.params, f"{inside}.weight": Cut(-2, uneven=True)}
    return replace(plan, params=params, modules={**plan.modules, inside: "embedding_rowwise"})


def output_and_input(model: object) -> tuple[nn.Module | None, nn.Module | None]:
    """The model's embedding and its head over the vocabulary; None for a missing one."""
    found: list[nn.Module | None] = []
    for method in ("get_input_embeddings", "get_output_embeddings"):
        try:
            module = getattr(model, method)()
        except (AttributeError, NotImplementedError, TypeError):
            module = None
        found.append(module if isinstance(module, nn.Module) else None)
    return found[0], found[1]
