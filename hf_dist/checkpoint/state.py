"""What a checkpoint holds of an engine, under parameter names: fp32 master weights, optimizer state, plain values.

    weights.<parameter>                  interval of the master weights
    optimizer.<key>.<parameter>          interval of an optimizer state shaped like the parameter (exp_avg, ...)
    optimizer_scalar.<key>.<parameter>   one value per parameter (step)
    rank.<rank>.<key>                    what belongs to one rank (random state)

No name contains a rank's layout, so any other layout finds its part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from hf_dist.checkpoint import dcp
from hf_dist.checkpoint.flat_slice import FlatSlice
from hf_dist.checkpoint.parts import OwnedPart
from hf_dist.errors import CheckpointError
from hf_dist.log import warn_once
from hf_dist.mesh import ParallelMesh
from hf_dist.optim.attach import Fragment, FragmentedOptimizer
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.runtime import ShardedModel

COMMON = "common.pt"
"""Numbers and strings that are equal on every rank: param group options, schedule, scaler, counters."""

Take = Callable[[str, torch.Tensor], torch.Tensor]
"""How a tensor enters the checkpoint under a name: as it is, or as a copy on the host."""

Stored = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Global shape and dtype of what a checkpoint holds, by the names above."""
Scalars = list[tuple[dict[str, Any], str, torch.Tensor]]
"""Values to be put into an optimizer's state once they are read: (state of one parameter, key, value)."""


class Stateful(Protocol):
    """What is saved: the engine."""

    sharded: ShardedModel
    fragments: FragmentedOptimizer | None

    @property
    def mesh(self) -> ParallelMesh:
        """Axes and ranks."""

    def plain_state(self) -> dict[str, Any]:
        """Numbers and strings, equal on every rank."""

    def load_plain_state(self, state: dict[str, Any]) -> None:
        """Restore them."""


def owned_parts(sharded: ShardedModel, take: Take) -> Iterator[tuple[FlatGroup, OwnedPart]]:
    """The parts of all weights that this rank writes. Replicas of a shard group write nothing, nor do later holders of
    what several pipeline stages hold."""
    if sharded.mesh.dp_replicate.rank > 0:
        return
    for group in (g for g in sharded.groups if g.counts):
        start, stop = (position - group.resting[0] for position in group.owned)
        values = group.source[start:stop]
        if group.trainable:  # frozen weights do not change while a copy is being written
            values = take(f"weights.{group.layout.slots[0].name}", values)
        for slot in group.layout.slots:
            first, last = group.layout.fragment(slot, sharded.mesh.dp_shard.rank)
            at = slot.offset + first - group.owned[0]
            if last > first:
                yield group, OwnedPart(slot.name, slot.shape, first, last, values[at : at + last - first])


def saved_state(
    engine: Stateful, parts: Iterable[tuple[FlatGroup, OwnedPart]], take: Take
) -> dict[str, FlatSlice | torch.Tensor]:
    """This rank's tensors: every element of the training state is in exactly one rank's. Local."""
    state: dict[str, FlatSlice | torch.Tensor] = {
        f"weights.{part.name}": FlatSlice(part.values, part.start, part.shape)
        for group, part in parts
        if group.trainable
    }
    if engine.fragments is None or engine.mesh.dp_replicate.rank > 0:
        return state
    for fragment in engine.fragments.fragments:
        first, last, offset = _owned_interval(fragment)
        if last == first or not fragment.group.counts:
            continue
        slot = fragment.group.layout.slots[fragment.index]
        for key, value in engine.fragments.optimizer.state.get(fragment.tensor, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == fragment.tensor.shape:
                name = f"optimizer.{key}.{fragment.name}"
                state[name] = FlatSlice(take(name, value[offset : offset + last - first]), first, slot.shape)
            elif value is not None and first == 0:
                name = f"optimizer_scalar.{key}.{fragment.name}"
                state[name] = take(name, _scalar(value))
    return state


def _owned_interval(fragment: Fragment) -> tuple[int, int, int]:
    """(start, stop) within the parameter that this rank writes, and where that begins in the fragment."""
    group = fragment.group
    slot = group.layout.slots[fragment.index]
    first, last = group.layout.fragment(slot, group.mesh.dp_shard.rank)
    begins = group.resting[0] + fragment.start - slot.offset
    return first, last, first - begins


def _scalar(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def load_state(engine: Stateful, folder: Path, *, weights_only: bool = False) -> set[str]:
    """Read this rank's part from the training state in `folder`, whatever layout wrote it.

    Local but for the caller's check of problems; follow with `weights_changed()`. With `weights_only` optimizer, scaler
    and counters stay as they are. Returns the trainable parameters that the checkpoint does not hold. Raises
    `CheckpointError` for another model or files that cannot be read.
    """
    stored = dcp.stored_tensors(folder)
    wanted, missing = weight_targets(engine.sharded.trainable_groups, stored, folder)
    if missing and len(missing) == sum(len(g.layout.slots) for g in engine.sharded.trainable_groups):
        raise CheckpointError(
            f"{folder} holds none of the model's trainable parameters ({min(missing)}, ...): another model"
        )
    common = read_common(folder)
    scalars: Scalars = []
    if not weights_only and engine.fragments is not None and _same_optimizer(engine.fragments, common, folder):
        wanted |= optimizer_targets(engine.fragments, stored, scalars)
    dcp.read_state(folder, wanted)
    set_scalars(scalars)
    if not weights_only:
        engine.load_plain_state(common)
    return missing


def weight_targets(
    groups: Iterable[FlatGroup], stored: Stored, where: Path
) -> tuple[dict[str, FlatSlice | torch.Tensor], set[str]]:
    """(this rank's intervals of the weights of `groups` to fill, by `weights.<parameter>`; parameters not in `stored`).

    Raises `CheckpointError` for a parameter of another shape.
    """
    wanted: dict[str, FlatSlice | torch.Tensor] = {}
    missing: set[str] = set()
    for group in groups:
        for slot in group.layout.slots:
            name = f"weights.{slot.name}"
            if name not in stored:
                missing.add(slot.name)
                continue
            if stored[name][0] != slot.shape:
                raise CheckpointError(
                    f"{where}: {slot.name} has shape {stored[name][0]} there, {slot.shape} in the model. It was saved from "
                    "another model."
                )
            start, stop = group.fragment(slot)
            first = group.resting[0] + start - slot.offset
            if stop > start:
                wanted[name] = FlatSlice(group.source[start:stop], first, slot.shape)
    return wanted, missing


def set_scalars(scalars: Scalars) -> None:
    """Put values that were read into the optimizer's state; plain numbers become plain again."""
    for owner, key, value in scalars:
        owner[key] = value.item() if value.dtype in (torch.float64, torch.int64, torch.bool) else value


def _same_optimizer(fragments: FragmentedOptimizer, common: Mapping[str, Any], folder: Path) -> bool:
    saved = common.get("optimizer")
    if saved is None:
        return False
    now = type(fragments.optimizer).__name__
    if saved["type"] != now:
        warn_once(
            f"the checkpoint's optimizer is {saved['type']}, this run's is {now}: its state starts empty (from {folder.parent})"
        )
        return False
    groups = fragments.optimizer.param_groups
    if len(saved["param_groups"]) != len(groups):
        raise CheckpointError(
            f"{folder}: the optimizer had {len(saved['param_groups'])} param groups, this one has {len(groups)}; resume with "
            "the same optimizer settings"
        )
    return True


def optimizer_targets(
    fragments: FragmentedOptimizer, stored: Stored, scalars: Scalars
) -> dict[str, FlatSlice | torch.Tensor]:
    """Tensors to fill for the optimizer's state, which is attached to it here; `scalars` are set after reading."""
    keys: dict[str, list[tuple[str, str]]] = {}
    for name in stored:
        kind, _, rest = name.partition(".")
        if kind in ("optimizer", "optimizer_scalar"):
            key, _, parameter = rest.partition(".")
            keys.setdefault(parameter, []).append((kind, key))
    on_device = {
        id(p): bool(g.get("fused") or g.get("capturable"))
        for g in fragments.optimizer.param_groups
        for p in g["params"]
    }
    targets: dict[str, FlatSlice | torch.Tensor] = {}
    for fragment in fragments.fragments:
        slot = fragment.group.layout.slots[fragment.index]
        first = fragment.group.resting[0] + fragment.start - slot.offset
        state: dict[str, Any] = {}
        device = fragment.tensor.device
        for kind, key in keys.get(fragment.name, ()):
            name = f"{kind}.{key}.{fragment.name}"
            shape, dtype = stored[name]
            if kind == "optimizer":
                state[key] = torch.empty(fragment.stop - fragment.start, dtype=dtype, device=device)
                targets[name] = FlatSlice(state[key], first, shape)
            else:
                # torch keeps step counters on the CPU, unless one kernel reads them there.
                value = torch.empty(shape, dtype=dtype, device=device if on_device[id(fragment.tensor)] else "cpu")
                targets[name] = value
                scalars.append((state, key, value))
        if state:
            fragments.optimizer.state[fragment.tensor] = state
    return targets


def write_common(folder: Path, state: dict[str, Any]) -> None:
    """Write the plain values. One rank."""
    torch.save(state, folder / COMMON)


def read_common(folder: Path) -> dict[str, Any]:
    """The plain values; nothing but tensors, numbers and strings is unpickled."""
    try:
        common: dict[str, Any] = torch.load(folder / COMMON, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, zipfile and pickle have their own
        reason = str(error).splitlines()[0] if str(error) else ""
        raise CheckpointError(f"{folder / COMMON} cannot be read ({type(error).__name__}: {reason})") from error
    return common


def read_rank_values(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    """What rank `rank` saved for itself; empty if there was no such rank."""
    prefix = f"rank.{rank}."
    stored = {n: s for n, s in dcp.stored_tensors(folder).items() if n.startswith(prefix)}
    values = {n: torch.empty(shape, dtype=dtype) for n, (shape, dtype) in stored.items()}
    if values:
        dcp.read_state(folder, values)
    return {n.removeprefix(prefix): v for n, v in values.items()}
