"""Finds the modules that become units from the structure of the model, so that users need not list class names."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_dist.dist.mesh import ParallelMesh
from hf_dist.errors import ModelError
from hf_dist.memory.offload.storage import Storage
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.group_axes import GroupAxes, axes_by_name
from hf_dist.sharding.order import PassOrders
from hf_dist.sharding.placement import StatePlacements
from hf_dist.sharding.precision import Precision
from hf_dist.sharding.sliced_share import SlicedShare
from hf_dist.sharding.unit import ShardUnit

OWN_UNIT_EMBEDDING_NUMEL = 1 << 20
"""An untied embedding of at least this many elements is a unit of its own; a smaller one travels with the root."""


LeafModules = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""Class names, full module names, endings of module names (`zero_optimization.leaf_module`)."""


def find_unit_modules(model: nn.Module, leaf: LeafModules = ((), (), ())) -> dict[str, nn.Module]:
    """Modules to gather one at a time, by path, in order of registration. All other parameters belong to the root unit.

    A unit is a class that the model's author marked as a block (`_no_split_modules`, read from any submodule), or a repeated
    sibling: one of several children of the same class in an `nn.ModuleList` or `nn.Sequential`. Only outermost matches count,
    so the experts inside a decoder block stay with the block. A marked class that contains the input embeddings is no block,
    because other modules use `get_input_embeddings()` without its forward (ModernVBert). `leaf` names further units.
    """
    classes, names, suffixes = leaf
    hinted: set[str] = set()
    for module in model.modules():
        hinted.update(getattr(module, "_no_split_modules", None) or ())
    tables = _input_embeddings(model)
    units: dict[str, nn.Module] = {}
    # An explicit stack: a recursive closure would be a reference cycle that keeps the modules alive.
    left: list[tuple[str, nn.Module, bool]] = [("", model, False)]
    while left:
        path, module, repeated = left.pop()
        marked = type(module).__name__ in hinted and tables.isdisjoint(module.modules())
        embedding = isinstance(module, nn.Embedding) and module.weight.numel() >= OWN_UNIT_EMBEDDING_NUMEL
        named = type(module).__name__ in classes or path in names or any(path.endswith(s) for s in suffixes)
        if path and (marked or repeated or embedding or named) and any(True for _ in module.parameters()):
            units[path] = module
            continue
        children = list(module.named_children())
        siblings = _repeated_classes(module, [c for _, c in children])
        for name, child in reversed(children):
            left.append((f"{path}.{name}" if path else name, child, type(child) in siblings))
    return units


def _input_embeddings(model: nn.Module) -> set[nn.Module]:
    """Results of `get_input_embeddings` for the model and its submodules, where defined."""
    found: set[nn.Module] = set()
    for module in model.modules():
        with contextlib.suppress(NotImplementedError, AttributeError):
            found.add(module.get_input_embeddings())  # type: ignore[operator]
    return found


def _repeated_classes(module: nn.Module, children: list[nn.Module]) -> set[type]:
    """Classes of the repeated blocks among `children`. Hybrids alternate between classes; a Sequential may mix others in."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return set()
    # Leaf layers in a row (Linear, Linear) are not blocks: gathering them one by one costs latency for nothing.
    counts = Counter(type(c) for c in children if any(True for _ in c.children()))
    # A nested list is not a block either, but its elements may be.
    return {cls for cls, count in counts.items() if count > 1 and not issubclass(cls, (nn.ModuleList, nn.ModuleDict))}


def build_units(
    model: nn.Module,
    placements: StatePlacements,
    mesh: ParallelMesh,
    precision: Precision,
    storage: Storage,
    leaf: LeafModules = ((), (), ()),
    axes: Callable[[str], GroupAxes] | None = None,
    sliced: SlicedShare | None = None,
) -> list[ShardUnit]:
    """Flatten all parameters of `model` into units; unit 0 is the root. Rearranges memory, keeps the parameter objects.

    Collective over the shard axes for lazy parameters that rest replicated, else local. `axes`: axes of each parameter by name
    (default: all dense). Weights held by several pipeline stages have their own axes, so that their groups' layouts are equal.
    """
    _check_materialized(model)
    modules = find_unit_modules(model, leaf)
    members = unit_members(model, modules)
    axes = axes or axes_by_name(mesh)
    units: list[ShardUnit] = []
    for path, named in members.items():
        if not named and path:
            continue
        groups = [
            FlatGroup(g, placements, mesh, precision, storage, axes(g[0][0]), sliced)
            for g in travel_together(
                named, precision, axes, lambda name: axes(name).is_alone, placements.in_eights(precision)
            )
        ]
        used_by = [modules[path]] if path else _direct_owners(model, {p for _, p in named})
        units.append(ShardUnit(len(units), path, used_by, groups, not path, placements.stay))
    return units


def unit_members(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """(name, parameter) pairs of each unit, by module path. The root comes first; its path is empty."""
    inside: dict[nn.Parameter, set[str]] = defaultdict(set)
    for path, module in modules.items():
        for p in module.parameters():
            inside[p].add(path)
    owners = _owners(model)
    members: dict[str, list[tuple[str, nn.Parameter]]] = {"": []}
    members.update({path: [] for path in modules})
    for name, p in model.named_parameters():
        # A parameter shared between units, or with modules outside of units (tied embedding and head), must stay gathered
        # as long as its longest user, which is the root.
        paths = inside[p]
        outside = any(not _within(owner, paths) for owner in owners[p])
        members[next(iter(paths)) if len(paths) == 1 and not outside else ""].append((name, p))
    return members


def _owners(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Paths of all modules that hold each parameter, including those of tied parameters."""
    owners: dict[nn.Parameter, list[str]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        for p in module.parameters(recurse=False):
            owners[p].append(path)
    return owners


def _within(owner: str, paths: Iterable[str]) -> bool:
    return any(owner == path or owner.startswith(path + ".") for path in paths)


def _direct_owners(model: nn.Module, params: set[nn.Parameter]) -> list[nn.Module]:
    return [m for m in model.modules() if any(p in params for p in m.parameters(recurse=False))]


def travel_together(
    named: list[tuple[str, nn.Parameter]],
    precision: Precision,
    axes: Callable[[str], object],
    alone: Callable[[str], bool],
    apart: Container[str] = (),
) -> list[list[tuple[str, nn.Parameter]]]:
    """Split the parameters of one unit into groups. `axes`: returns the same object for parameters that may share a group;
    `alone`: whether a parameter shares with none; `apart`: names of those that share with one another only."""
    groups: dict[tuple[torch.dtype, bool, object, bool], list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, p in named:
        shares = name if alone(name) else id(axes(name))
        groups[precision.compute_dtype(name, p.dtype), p.requires_grad, shares, name in apart].append((name, p))
    return list(groups.values())


def _check_materialized(model: nn.Module) -> None:
    device_map: Any = getattr(model, "hf_device_map", None)
    if device_map and len(set(device_map.values())) > 1:
        raise ModelError(
            f"the model is spread over devices by device_map ({sorted(map(str, set(device_map.values())))[:4]}). "
            "hf_dist places parameters itself: load it without device_map."
        )
    if any(hasattr(p, "_hf_dist_owner") for p in model.parameters()):
        raise ModelError(
            "the model shares parameters with a prepared model. Call hf_dist.unprepare(that_model) first, on every rank."
        )


def containers(model: nn.Module, units: list[ShardUnit]) -> list[nn.Module]:
    """Modules whose forward covers the whole model: the root, and submodules that contain every block (`model.model`).

    Each can start a pass: `generate` of a PEFT model enters at the base model, and TRL calls the decoder directly.
    """
    blocks = {id(m) for u in units if not u.is_root for m in u.modules if not isinstance(m, nn.Embedding)}
    if not blocks:
        return [model]
    inside: dict[int, frozenset[int]] = {}  # so that each module is visited once, not once per module above it

    def blocks_of(module: nn.Module) -> frozenset[int]:
        if id(module) not in inside:
            inside[id(module)] = frozenset(blocks & {id(module)})  # also ends a circle
            inside[id(module)] |= frozenset().union(*map(blocks_of, module.children()))
        return inside[id(module)]

    return [
        module
        for module in model.modules()
        if module is model or (blocks_of(module) == blocks and not isinstance(module, (nn.ModuleList, nn.Sequential)))
    ]


def orders_of(units: Sequence[ShardUnit], names: Container[str] | None) -> PassOrders:
    """Orders of the passes through the units that hold any parameter of `names` (a pipeline stage), or through all. Local."""
    members = [
        u.index
        for u in units
        if u.is_root or names is None or any(s.name in names for g in u.groups for s in g.layout.slots)
    ]
    in_backward = {u.index for u in units if u.needed_in_backward}
    return PassOrders(members, in_backward, {u.index for u in units if u.trainable})
