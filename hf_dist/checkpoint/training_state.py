"""What a checkpoint stores of an engine, by parameter name: fp32 master weights, optimizer state, plain values.

    weights.<parameter>                  interval of the master weights
    optimizer.<key>.<parameter>          interval of an optimizer state shaped like the parameter (exp_avg, ...)
    optimizer_scalar.<key>.<parameter>   one value per parameter (step)
    replica.<number>.optimizer...        the same for each replica that trains alone; the first one uses the plain names
    outer.momentum.<parameter>           interval of the outer momentum of replicas that train alone
    outer.anchor.<parameter>             interval of the start point of a fragment's next outer step, if fragments take turns
    outer.partial.<parameter>            interval of a server's sum of movements that its momentum does not have yet
    rank.<rank>.<key>                    values of one rank (random state)
    residual.<rank>...                   what a rank's encoded messages have left out (`residuals.py`)

No name depends on the layout, so any other layout finds its part.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from hf_dist.checkpoint import dcp
from hf_dist.checkpoint.flat_slice import FlatSlice
from hf_dist.checkpoint.owned_part import OwnedPart
from hf_dist.checkpoint.residuals import fill_residuals, stored_residuals
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.errors import CheckpointError
from hf_dist.memory.offload.resting import Tier, opened
from hf_dist.optim.attach import FragmentedOptimizer
from hf_dist.optim.beside import Beside
from hf_dist.optim.compound import is_part, put
from hf_dist.optim.fragment import Fragment
from hf_dist.optim.optimizers import Optimizers
from hf_dist.optim.resume_hyperparams import take_options
from hf_dist.parallel.local_sgd.outer import OuterOptimizer
from hf_dist.parallel.local_sgd.served import ServedOuter
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.runtime import ShardedModel

COMMON = "common.pt"
"""Numbers and strings that are equal on every rank: param group options, schedule, scaler, counters."""

_OUTER, _REPLICA, _STATES = "outer.", "replica.", ("optimizer.", "optimizer_scalar.")

Take = Callable[[str, Any], Any]
"""How a tensor (or `Sliceable`) enters the checkpoint under a name: itself, or a copy on the host."""

Stored = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Global shape and dtype of the stored tensors, by the names above."""
Read = Callable[[dict[str, "FlatSlice | torch.Tensor"]], None]
"""Fills tensors by name."""
Scalars = list[tuple[dict[str, object], str, torch.Tensor]]
"""Values to put into an optimizer's state after reading: (state of one parameter, key, value)."""


class Stateful(Protocol):
    """What is saved, namely the engine."""

    sharded: ShardedModel
    number: int
    global_steps: int

    @property
    def fragments(self) -> Optimizers | None:
        """What steps this rank's fragments; None without an optimizer."""

    @property
    def outer(self) -> OuterOptimizer | ServedOuter | None:
        """Of replicas that train alone."""

    @property
    def mesh(self) -> ParallelMesh:
        """Axes and ranks."""

    @property
    def beside(self) -> Sequence[Beside]:
        """What is trained on other ranks by the same backwards."""

    @property
    def verifies_checkpoints(self) -> bool:
        """Whether the bytes of a checkpoint are compared with their digests before it is loaded."""

    def plain_state(self) -> dict[str, object]:
        """Numbers and strings, equal on every rank."""

    def load_plain_state(self, state: dict[str, object]) -> None:
        """Restore the plain state, except the optimizer's options."""

    def zero_grad(self) -> None:
        """Discard the current window."""


def owned_parts(sharded: ShardedModel, take: Take) -> Iterator[tuple[FlatGroup, OwnedPart]]:
    """The parts of all weights that this rank writes; of several ranks with the same elements, one owns them."""
    if sharded.mesh.replica:
        return  # the first replica writes them; right after a meeting replicas are equal
    for group in (g for g in sharded.groups if g.axes.owns):
        start, stop = (position - group.resting[0] for position in group.owned)
        values = group.master.part(start, stop)
        if group.trainable or group.rest.version:  # other frozen weights do not change during the write
            values = take(f"weights.{group.layout.slots[0].name}", values)
        for slot in group.layout.slots:
            first, last = group.layout.fragment(slot, group.axes.place)
            at = slot.offset + first - group.owned[0]
            if last > first:
                yield group, OwnedPart(slot.name, slot.held, first, last, values.narrow(0, at, last - first))


def whole_parts(sharded: ShardedModel) -> Iterator[OwnedPart]:
    """All weights, from this rank alone; see `whole_here`. Local."""
    for group in sharded.groups:
        group.take_writes()
        masters = group.resting == (0, group.layout.numel)
        for slot, param in zip(group.layout.slots, group.params, strict=True):
            values = group.master.part(slot.offset, slot.stop) if masters else param.detach().reshape(-1)
            yield OwnedPart(slot.name, slot.held, 0, slot.numel, values)


def whole_here(sharded: ShardedModel) -> bool:
    """Whether each rank holds all weights at full precision. Local, and equal on all ranks."""
    cut = any(sharded.mesh.axes.size(axis) > 1 for axis in ("pp", "tp", "ep"))
    return not cut and all(
        group.resting == (0, group.layout.numel)
        or (
            group.is_replicated
            and not group.at_rest.arrives_rounded
            and all(dtype == group.dtype for dtype in group.loaded_dtypes)
        )
        for group in sharded.groups
    )


def check_states(fragments: FragmentedOptimizer) -> None:
    """Raise `CheckpointError` for an optimizer state that is neither one value nor one element per parameter element.

    Such a state belongs to blocks of a fragment (scales of 8-bit states) and means nothing in another layout. A tensor shared
    by all parameters (a table of 8-bit values) is allowed. Local.
    """
    if fragments.sees_whole:
        return  # then the state belongs to a tensor, whatever its shape
    found: dict[str, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for fragment in fragments.fragments:
        for key, value in fragments.scalars(fragment):
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                found[key].append((fragment.name, value))
    for key, values in found.items():
        name, first = values[0]
        others = [value for _, value in values[1:]]
        if not others or any(v.shape != first.shape or not torch.equal(v, first) for v in others):
            kind = type(fragments.optimizer).__name__
            raise CheckpointError(
                f"{kind} keeps a state {key!r} of {first.numel()} values for {name}, neither one per element nor one in "
                "all: it belongs to blocks of this rank's part and cannot be restored on another rank. Use an "
                'optimizer with states like the parameters, such as "AdamW", or one that keeps them in 32 bits'
            )


def saved_state(
    engine: Stateful, parts: Iterable[tuple[FlatGroup, OwnedPart]], take: Take
) -> dict[str, FlatSlice | torch.Tensor]:
    """This rank's tensors. Each element of the training state is in exactly one rank's. Local."""
    state: dict[str, FlatSlice | torch.Tensor] = {
        f"weights.{part.name}": FlatSlice(part.values, part.start, part.held)
        for group, part in parts
        if group.trainable
    }
    state |= stored_residuals(engine.sharded, take)
    if engine.outer is not None and not engine.mesh.replica:
        state |= _outer_state(engine.outer, take)
    if engine.fragments is None:
        return state
    for member in engine.fragments.members:
        state.update(_optimizer_state(member, _of_replica(engine.mesh.replica), take))
    return state


def _optimizer_state(
    fragments: FragmentedOptimizer, own: str, take: Take
) -> Iterator[tuple[str, FlatSlice | torch.Tensor]]:
    """(name, values) of what this rank writes of an optimizer's state; `own`: the prefix of all names."""
    for fragment in fragments.fragments:
        first, last = fragment.written
        if last == first or not fragment.group.axes.owns:
            continue
        slot, offset = fragment.slot, first - fragment.first
        for key, elements in fragments.states(fragment):
            name = f"{own}optimizer.{key}.{fragment.name}"
            yield name, FlatSlice(take(name, elements.narrow(0, offset, last - first)), first, slot.held)
        for key, value in fragments.scalars(fragment):
            has_value = isinstance(value, (torch.Tensor, int, float))
            if has_value and first == 0 and slot.held.in_whole(0) == 0:  # written by one rank, whoever holds the others
                name = f"{own}optimizer_scalar.{key}.{fragment.name}"
                yield name, take(name, _scalar(value))


def _of_replica(number: int) -> str:
    """The prefix of the names of a replica's own states."""
    return f"{_REPLICA}{number}." if number else ""


def _outer_state(outer: OuterOptimizer | ServedOuter, take: Take) -> dict[str, FlatSlice]:
    """The outer momentum, plus the anchors if they differ from the weights (replicas meet before a save)."""
    state = {}
    for kind, group, values_at_rest in outer.states():
        if not group.axes.owns:
            continue
        for slot in group.layout.slots:
            first, last = group.layout.fragment(slot, group.axes.place)
            if last > first:
                name, at = f"{_OUTER}{kind}.{slot.name}", slot.offset + first - group.resting[0]
                values = take(name, values_at_rest.part(at, at + last - first))
                state[name] = FlatSlice(values, first, slot.held)
    return state


def _fill_outer(outer: OuterOptimizer | ServedOuter, stored: Stored, read: Read) -> None:
    """Fill the outer states of this rank's shards: momentum is zero if not stored, anchors are read all or none. Local."""
    states = list(outer.loading_states())
    anchors = {f"{_OUTER}anchor.{s.name}" for kind, group, _ in states if kind == "anchor" for s in group.layout.slots}
    for kind, group, at_rest in states:
        if kind == "anchor" and not anchors <= set(stored):
            continue
        with opened(at_rest, changed=True) as values:
            values.zero_()
            wanted: dict[str, FlatSlice | torch.Tensor] = {}
            for slot in group.layout.slots:
                name, (start, stop) = f"{_OUTER}{kind}.{slot.name}", group.fragment(slot)
                if stop > start and name in stored:
                    first = group.resting[0] + start - slot.offset
                    wanted[name] = FlatSlice(values[start:stop], first, slot.held)
            if wanted:
                read(wanted)
    if anchors and anchors <= set(stored):
        outer.anchors_loaded()


def _for_replica(stored: Stored, read: Read, replica: int) -> tuple[Stored, Read]:
    """View `stored` and `read` as one replica's checkpoint. Stored replicas are assigned in turn."""
    numbers = {int(name.split(".")[1]) for name in stored if name.startswith(_REPLICA)}
    own = _of_replica(replica % (len(numbers) + 1))
    names = {name.removeprefix(own): name for name in stored if own and name.startswith(own)}

    def read_own(wanted: dict[str, FlatSlice | torch.Tensor]) -> None:
        read({names.get(name, name): values for name, values in wanted.items()})

    plain = {name: kind for name, kind in stored.items() if not (own and name.startswith(_STATES))}
    return {**plain, **{short: stored[name] for short, name in names.items()}}, read_own


def _scalar(value: object) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def load_state(engine: Stateful, folder: Path, *, weights_only: bool = False) -> set[str]:
    """Read this rank's part from the training state in `folder`, whatever layout wrote it.

    Local, except that the caller shares errors; call `weights_changed()` afterwards. With `weights_only`, optimizer, scaler
    and counters stay as they are. Returns the trainable parameters that the checkpoint lacks. Raises
    `CheckpointError` for another model or files that cannot be read.
    """
    stored = dcp.stored_tensors(folder)
    groups = engine.sharded.trainable_groups
    missing = missing_weights(groups, stored, folder)
    if missing and len(missing) == sum(len(g.layout.slots) for g in groups):
        raise CheckpointError(
            f"{folder} holds none of the model's trainable parameters ({min(missing)}, ...): another model"
        )
    common = read_common(folder)
    read = functools.partial(dcp.read_state, folder)
    fill_weights(groups, stored, read)
    fill_residuals(engine.sharded, stored, read, None if weights_only else common.get("messages"))
    if not weights_only:
        if engine.fragments is not None:
            optimizer, names = engine.fragments.optimizer, engine.fragments.param_names
            same = take_options(optimizer, names, common.get("optimizer"), folder.parent)
            engine.fragments.has_own_options = not same
            own, read_own = _for_replica(stored, read, engine.mesh.replica)
            for member in engine.fragments.members:
                fill_optimizer(member, own if same else {}, read_own)
        if engine.outer is not None:
            _fill_outer(engine.outer, stored, read)
        engine.load_plain_state(common)
    return missing


def missing_weights(groups: Iterable[FlatGroup], stored: Stored, where: Path) -> set[str]:
    """Parameters of `groups` that are not in `stored`. Raises `CheckpointError` for a parameter of another shape."""
    missing: set[str] = set()
    for slot in (slot for group in groups for slot in group.layout.slots):
        name = f"weights.{slot.name}"
        if name not in stored:
            missing.add(slot.name)
        elif stored[name][0] != slot.held.whole:
            raise CheckpointError(
                f"{where}: {slot.name} has shape {stored[name][0]} there, {slot.held.whole} in the model. It was saved from "
                "another model."
            )
    return missing


def fill_weights(groups: Iterable[FlatGroup], stored: Stored, read: Read) -> None:
    """Fill this rank's intervals of the weights of `groups` where they are stored. Call `weights_changed()` afterwards."""
    for some in _rounds(groups, lambda group: group):
        with ExitStack() as stack:
            wanted: dict[str, FlatSlice | torch.Tensor] = {}
            for group in some:
                masters = stack.enter_context(opened(group.master, changed=True))
                for slot in group.layout.slots:
                    start, stop = group.fragment(slot)
                    if stop > start and f"weights.{slot.name}" in stored:
                        first = group.resting[0] + start - slot.offset
                        wanted[f"weights.{slot.name}"] = FlatSlice(masters[start:stop], first, slot.held)
            read(wanted)
        for group in some:
            group.masters_changed()


def fill_optimizer(fragments: FragmentedOptimizer, stored: Stored, read: Read) -> None:
    """Load the stored optimizer state of this rank's fragments; reset it where nothing is stored. Local."""
    for some in _rounds((b for b in fragments.batches if b.groups), lambda batch: batch.groups[0]):
        with ExitStack() as stack:
            scalars: Scalars = []
            wanted: dict[str, FlatSlice | torch.Tensor] = {}
            for batch in some:
                stack.enter_context(fragments.opened(batch))
                fragments.forget(batch)
                wanted |= optimizer_targets(fragments, batch.fragments, stored, scalars)
            if wanted:
                read(wanted)
            set_scalars(scalars)


_Part = TypeVar("_Part")


def _rounds(parts: Iterable[_Part], group_of: Callable[[_Part], FlatGroup]) -> Iterator[list[_Part]]:
    """Parts in memory form one round; parts on disk take turns, because they may not fit into memory together."""
    parts = list(parts)
    on_disk = [p for p in parts if group_of(p).master.tier is Tier.DISK]
    yield [p for p in parts if p not in on_disk]
    for part in on_disk:
        yield [part]


def set_scalars(scalars: Scalars) -> None:
    """Put the values that were read into the optimizer's state; plain numbers become plain numbers again."""
    for owner, key, value in scalars:
        is_number = value.dim() == 0 and value.dtype in (torch.float64, torch.int64, torch.bool)
        put(owner, key, value.item() if is_number else value)


def optimizer_targets(
    fragments: FragmentedOptimizer, some: Iterable[Fragment], stored: Stored, scalars: Scalars
) -> dict[str, FlatSlice | torch.Tensor]:
    """Tensors to fill for the state of the fragments `some`, already attached to the optimizer. Set `scalars` after reading."""
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
    for fragment in some:
        slot, first = fragment.slot, fragment.first
        state: dict[str, object] = {}
        device = fragment.tensor.device
        if any(is_part(key) for _, key in keys.get(fragment.name, ())):
            state = fragments.structure(fragment)
        for kind, key in keys.get(fragment.name, ()):
            name = f"{kind}.{key}.{fragment.name}"
            shape, dtype = stored[name]
            if kind == "optimizer":
                # Stepped in fp32; a batch that keeps bf16 rounds again, to the same bits.
                dtype = torch.float32 if dtype is torch.bfloat16 else dtype
                flat = torch.empty(fragment.stop - fragment.start, dtype=dtype, device=device)
                scalars.append((state, key, flat.view(fragment.shape)))
                targets[name] = FlatSlice(flat, first, slot.held)
            else:
                # torch keeps step counters on the CPU, except where a kernel reads them on the device.
                value = torch.empty(shape, dtype=dtype, device=device if on_device[id(fragment.tensor)] else "cpu")
                targets[name] = value
                scalars.append((state, key, value))
        if keys.get(fragment.name):
            fragments.optimizer.state[fragment.tensor] = state
    return targets


def write_common(folder: Path, state: dict[str, object]) -> None:
    """Write the plain values. One rank calls it."""
    torch.save(state, folder / COMMON)


def read_common(folder: Path) -> dict[str, Any]:
    """The plain values. Only tensors, numbers and strings are unpickled."""
    try:
        common: dict[str, object] = torch.load(folder / COMMON, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, zipfile and pickle each raise their own types
        reason = str(error).splitlines()[0] if str(error) else ""
        raise CheckpointError(f"{folder / COMMON} cannot be read ({type(error).__name__}: {reason})") from error
    return common


def read_rank_values(folder: Path, rank: int) -> dict[str, torch.Tensor]:
    """The values that rank `rank` saved for itself; empty if there was no such rank."""
    prefix = f"rank.{rank}."
    stored = {n: s for n, s in dcp.stored_tensors(folder).items() if n.startswith(prefix)}
    values = {n: torch.empty(shape, dtype=dtype) for n, (shape, dtype) in stored.items()}
    if values:
        dcp.read_state(folder, values)
    return {n.removeprefix(prefix): v for n, v in values.items()}
