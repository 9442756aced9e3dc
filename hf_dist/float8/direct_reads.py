"""Weights that modules read past the forward of their layer: fused kernels of Mamba, torch's MultiheadAttention, DoRA.

Such a layer would not multiply in float8, and its weight must not travel as if it did. Found in the source of the classes:
`self.out_proj.weight` as a value, not only its dtype or shape.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

from torch import nn

__all__ = ["direct_reads"]

_FACTS = frozenset({"dtype", "device", "shape", "size", "ndim", "dim", "requires_grad", "is_meta", "numel"})
"""What code asks of a weight without reading its elements."""
_WITHOUT_VALUE = frozenset({"isinstance", "hasattr", "getattr", "id", "type"})


def direct_reads(model: nn.Module) -> frozenset[str]:
    """Paths of the modules in `model` whose weight other code of the model reads; none where there is no source. Local."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in (*_of_classes(type(module)), *_below_adapter(module))
    )


def _below_adapter(module: nn.Module) -> tuple[str, ...]:
    """The layer below an adapter of PEFT that may read its weight. LoRA calls it; DoRA takes the norms of its rows as well."""
    children = module._modules
    if children.get("base_layer") is None:
        return ()
    norms: Any = children.get("lora_magnitude_vector") or ()
    return () if "lora_A" in children and not len(norms) else ("base_layer",)


def _of_classes(cls: Any) -> frozenset[str]:
    return frozenset().union(*(_of_class(base) for base in cls.__mro__ if issubclass(base, nn.Module)))


@functools.cache
def _of_class(cls: Any) -> frozenset[str]:
    if cls is nn.Module:
        return frozenset()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    found: set[str] = set()
    for method in ast.walk(tree):
        if isinstance(method, ast.FunctionDef) and not method.name.startswith(("_init", "__init", "reset_", "tie_")):
            asked = _asked(method)
            found |= {name for node in ast.walk(method) if id(node) not in asked and (name := _weight_of(node))}
    return frozenset(found)


def _weight_of(node: ast.AST) -> str:
    """`a.b` of `self.a.b.weight`; empty for anything else."""
    if not (isinstance(node, ast.Attribute) and node.attr == "weight" and isinstance(node.ctx, ast.Load)):
        return ""
    names, owner = [], node.value
    while isinstance(owner, ast.Attribute):
        names.append(owner.attr)
        owner = owner.value
    return ".".join(names[::-1]) if isinstance(owner, ast.Name) and owner.id == "self" else ""


def _asked(method: ast.AST) -> set[int]:
    """Nodes of `method` of which only a fact is asked."""
    asked: set[int] = set()
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute) and node.attr in _FACTS:
            asked.add(id(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _WITHOUT_VALUE:
            asked |= {id(argument) for argument in node.args}
    return asked
