"""Finds the blocks between which a model can be cut, and its other modules with parameters, from structure alone."""

from __future__ import annotations

from collections import Counter

from torch import nn

__all__ = ["find_blocks", "find_outside"]


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Outermost repeated siblings, by path: the children, except bare layers, of a list with two or more of one class.

    A list with a single child also counts if nothing inside the child repeats: it may be called many times (ALBERT).
    """
    blocks: dict[str, nn.Module] = {}
    left: list[tuple[str, nn.Module]] = [("", model)]
    while left:
        path, module = left.pop()
        children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
        whole = [(name, child) for name, child in children if _is_whole(child)]
        counts = Counter(type(child) for _, child in whole)
        if isinstance(module, nn.ModuleList | nn.Sequential) and max(counts.values(), default=0) > 1:
            blocks.update(whole)
        elif isinstance(module, nn.ModuleList) and len(whole) == 1:
            (name, child), inner = whole[0], find_blocks(whole[0][1])
            blocks.update({f"{name}.{path}": block for path, block in inner.items()} or {name: child})
        else:
            left += reversed(children)
    return blocks


def _is_whole(module: nn.Module) -> bool:
    """Whether the module has parameters and children and is not a mere container."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def find_outside(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Outermost modules with parameters that are not blocks and neither contain nor belong to one: embeddings, norms, heads."""
    inside = {id(m) for block in blocks.values() for m in block.modules()}
    found: dict[str, nn.Module] = {}
    left: list[tuple[str, nn.Module]] = [("", model)]
    while left:
        path, module = left.pop()
        for name, child in module.named_children():
            below = {id(m) for m in child.modules()}
            if id(child) in inside or not any(True for _ in child.parameters()):
                continue
            full = f"{path}.{name}" if path else name
            if below & inside or isinstance(child, nn.ModuleList | nn.ModuleDict):
                left.append((full, child))
            else:
                found[full] = child
    return found
