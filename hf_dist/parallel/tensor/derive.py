"""Derives a plan for products that no plan names: pairs in the order in which a block calls them, each kept if it verifies.

Products that read the same tensor are columns; the next product called that reads another tensor is their row. Fused ones
are cut in one, two or three segments. Head counts and widths stored by the modules around them are divided, or not.
Verification decides which variant is right. If none verifies, that kind of pair stays whole.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hf_dist.errors import HfDistError
from hf_dist.parallel.tensor.plan import (
    GATHERED,
    Cut,
    SplitPlan,
    column_dim,
    output_and_input,
    pattern_of,
    row_dim,
)
from hf_dist.parallel.tensor.verify import Unsplit, loss_of

__all__ = ["completed"]

_HEADS = r"(num|n)_(attention_|query_|kv_|key_value_)?heads?|num_heads|n_head|num_key_value_heads|n_heads"
_INNER = r"all_head_size|split_size|inner_dim|kv_dim|attention_head_size_all|q_dim"
_WIDTH = r"embed_dim|hidden_size|d_model|n_embd|dim"
_OPEN = GATHERED | {"rowwise_split_input", "rowwise_rep"}
"""Styles that send whole activations; a pair that verifies is better."""

_FAILS = (HfDistError, RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError, AssertionError)
"""Errors that a model's code raises for sizes that do not fit together."""

Verify = Callable[[SplitPlan], SplitPlan]
Kind = tuple[tuple[str, ...], str]
Blocks = Mapping[str, nn.Module]


def completed(plan: SplitPlan, reference: Unsplit, blocks: Blocks, verify: Verify) -> SplitPlan:
    """`plan`, which verifies, plus every kind of pair in `blocks` that it omits and that verifies as well; then the
    vocabulary. Local, on the CPU; several verifications per kind."""
    modules = dict(reference.model.named_modules())
    added = 0
    for kind in _kinds(plan, reference, blocks):
        for trial in _trials(plan, kind, modules, blocks):
            try:
                plan, added = verify(trial), added + 1
                break
            except _FAILS:
                continue
    if not plan.params:
        return plan
    trial = _with_vocabulary(plan, reference.model)
    if trial is not plan:
        with contextlib.suppress(*_FAILS):
            plan, added = verify(trial), added + 1
    if not added:
        return plan
    return plan if plan.source == "derived" else replace(plan, source=f"{plan.source}, completed")


def _kinds(plan: SplitPlan, reference: Unsplit, blocks: Blocks) -> Iterator[Kind]:
    """Pairs of products that are called one after the other in some block, each once, by patterns of names."""
    calls: list[tuple[str, str, int]] = []
    hold: list[torch.Tensor] = []  # keeps these alive, so that ids stay unique
    handles = []
    for block, module in blocks.items():
        for name, product in module.named_modules():
            if isinstance(product, nn.Linear) or type(product).__name__ == "Conv1D":

                def hook(
                    _: nn.Module, args: Any, output: object, full: str = f"{block}.{name}", block: str = block
                ) -> None:
                    if args and isinstance(args[0], torch.Tensor):
                        hold.append(args[0])
                        calls.append((block, full, id(args[0])))

                handles.append(product.register_forward_hook(hook))
    try:
        loss_of(reference.model, reference.batches[0])
    finally:
        for handle in handles:
            handle.remove()
    found: dict[Kind, None] = {}
    for block in blocks:
        group: list[str] = []
        source = None
        for where, full, tensor in calls:
            if where != block:
                continue
            if source is None or tensor == source:
                group.append(full)
                source = tensor
                continue
            kind = (tuple(pattern_of(name) for name in group), pattern_of(full))
            if all(plan.modules.get(name, next(iter(_OPEN))) in _OPEN for name in (*kind[0], kind[1])):
                found[kind] = None
            group, source = [], None
    yield from found


def _trials(plan: SplitPlan, kind: Kind, modules: Mapping[str, nn.Module], blocks: Blocks) -> Iterator[SplitPlan]:
    """Ways to split one kind of pair: all combinations of segments and divided attributes."""
    columns, row = kind
    members = {pattern_of(name): module for name, module in modules.items()}
    matrices: Mapping[str, Any] = {name: members[name] for name in (*columns, row)}
    out: list[int] = [m.weight.shape[column_dim(m)] for m in (matrices[name] for name in columns)]
    inner: int = matrices[row].weight.shape[row_dim(matrices[row])]
    heads = _attributes(modules, blocks, (*columns, row), (_HEADS,))
    more = [
        _attributes(modules, blocks, (*columns, row), names) for names in ((_HEADS, _INNER), (_HEADS, _INNER, _WIDTH))
    ]
    options = list(dict.fromkeys([frozenset(), heads, *more]))
    segments: list[tuple[int, ...]] = [(1,)] if len(columns) > 1 else [(1,), (1, 1, 1), (1, 1)]
    if len(columns) == 1 and out[0] > inner and (out[0] - inner) % 2 == 0:
        rest = (out[0] - inner) // 2  # queries, and fewer keys and values
        if rest != inner:
            segments.append((inner, rest, rest))
    for some, divided in itertools.product(segments, options):
        params = dict(plan.params)
        styles = dict(plan.modules)
        for name in columns:
            module = members[name]
            params[f"{name}.weight"] = Cut(column_dim(module), some)
            if getattr(module, "bias", None) is not None:
                params[f"{name}.bias"] = Cut(-1, some)
            styles[name] = "colwise"
        params[f"{row}.weight"] = Cut(row_dim(members[row]))
        params.pop(f"{row}.bias", None)
        styles[row] = "rowwise"
        yield replace(plan, params=params, modules=styles, divided=plan.divided | divided)


def _attributes(
    modules: Mapping[str, nn.Module], blocks: Blocks, products: tuple[str, ...], names: tuple[str, ...]
) -> frozenset[tuple[str, str]]:
    """(module, attribute): integers of the modules inside a block that contain one of the products."""
    found = set()
    inside = {pattern_of(block) for block in blocks}
    for path, module in modules.items():
        pattern = pattern_of(path)
        if not any(pattern.startswith(f"{block}.") for block in inside):
            continue
        if any(product.startswith(f"{pattern}.") for product in products):
            for key, value in vars(module).items():
                if type(value) is int and any(re.fullmatch(name, key) for name in names):
                    found.add((pattern, key))
    return frozenset(found)


def _with_vocabulary(plan: SplitPlan, model: nn.Module) -> SplitPlan:
    """Split embedding and head by rows of the vocabulary, where the plan leaves them whole."""
    embedding, head = output_and_input(model)
    names = {id(module): pattern_of(name) for name, module in model.named_modules()}
    params, styles = dict(plan.params), dict(plan.modules)
    inside = names.get(id(embedding))
    is_plain = isinstance(embedding, nn.Embedding) and type(embedding).forward is nn.Embedding.forward
    if inside is not None and inside not in styles and is_plain:
        params[f"{inside}.weight"] = Cut(-2, uneven=True)
        styles[inside] = "embedding_rowwise"
    outside = names.get(id(head))
    tied = head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", 0)
    alone = not tied or f"{inside}.weight" in params
    if outside is not None and outside not in styles and isinstance(head, nn.Linear) and alone:
        params[f"{outside}.weight"] = Cut(-2, uneven=True)
        if head.bias is not None:
            params[f"{outside}.bias"] = Cut(-1, uneven=True)
        styles[outside] = "colwise_gather_output"
    if styles == dict(plan.modules):
        return plan
    return replace(plan, params=params, modules=styles)
