"""Two parameters on the same elements (`a.data = b.data`; PEFT ties adapters by a transposed view): equal after each step.

In torch both are stepped, each with its own gradient and optimizer state, and the elements get both changes. A flat buffer
gives each parameter a place of its own, so the sum of the two changes is brought to both places after the step. Only a weight
decay is not quite such a sum: torch's loop over tensors decays the first change too, by lr x decay of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_dist.dist import collectives
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.memory.offload.resting import opened
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.guard import LAZY
from hf_dist.sharding.slices import joined

__all__ = ["TiedView", "TiedViews", "bytes_of", "same_elements", "separated"]


@dataclass(frozen=True)
class TiedView:
    """Parameters that are the same elements."""

    first: str
    others: tuple[tuple[str, bool], ...]
    """Names, and whether each is the first one transposed."""
    shape: tuple[int, ...]
    """Of the first, whole."""

    @property
    def names(self) -> list[str]:
        """Of all."""
        return [self.first, *(name for name, _ in self.others)]


def bytes_of(param: torch.Tensor) -> tuple[int, int, int]:
    """(storage, first byte in it, byte after the last)."""
    size = int(param.element_size())
    first = int(param.storage_offset()) * size
    last = sum(int((length - 1) * stride) for length, stride in zip(param.shape, param.stride(), strict=True))
    return param.untyped_storage().data_ptr(), first, first + (last + 1) * size


def same_elements(a: torch.Tensor, b: torch.Tensor) -> bool | None:
    """Whether `b` is `a` transposed (True) or `a` itself (False), in the same memory; None if it is neither."""
    if a.dtype != b.dtype or bytes_of(a) != bytes_of(b):
        return None
    if (a.shape, a.stride()) == (b.shape, b.stride()):
        return False
    return True if a.dim() == b.dim() == 2 and (a.shape, a.stride()) == (b.shape[::-1], b.stride()[::-1]) else None


@torch.no_grad()
def separated(model: nn.Module) -> list[TiedView]:
    """Give each but the first of such parameters, if they are trained, memory of its own; returns what was separated. Local."""
    at: dict[tuple[int, int, int], tuple[str, nn.Parameter]] = {}
    found: dict[str, list[tuple[str, bool]]] = {}
    own = dict(model.named_parameters())
    for name, param in own.items():  # in the order of the model, which all ranks share, as addresses are not
        if hasattr(param, LAZY) or not param.numel() or not param.requires_grad or not bytes_of(param)[0]:
            continue  # tensors without memory are views of nothing
        known, first = at.setdefault(bytes_of(param), (name, param))
        transposed = None if first is param else same_elements(first, param)
        if transposed is not None:
            found.setdefault(known, []).append((name, transposed))
    for others in found.values():
        for name, _ in others:
            own[name].data = own[name].detach().contiguous().clone()
    return [TiedView(first, tuple(others), tuple(own[first].shape)) for first, others in found.items()]


class TiedViews:
    """Keeps such parameters of one sharded model equal."""

    def __init__(self, views: Sequence[TiedView], groups: Sequence[FlatGroup], mesh: ParallelMesh) -> None:
        """Collective over pp, if there are any."""
        self.views = views
        self.mesh = mesh
        self._places = {s.name: (g, i) for g in groups for i, s in enumerate(g.layout.slots)} if views else {}
        self._stages: dict[str, int] = {}
        if views:
            held = collectives.all_gather_object(mesh.pp, [n for n in self._names() if n in self._places])
            self._stages = {name: next(s for s, names in enumerate(held) if name in names) for name in self._names()}

    def _names(self) -> Iterator[str]:
        for view in self.views:
            yield from view.names

    def before_step(self) -> dict[str, torch.Tensor]:
        """This rank's elements of them, by name, to be given to `after_step`. Local."""
        found = {}
        for name in self._names():
            if name in self._places:
                group, index = self._places[name]
                start, stop = group.fragment(group.layout.slots[index])
                with opened(group.master) as masters:
                    found[name] = masters[start:stop].clone()
        return found

    @torch.no_grad()
    def after_step(self, before: dict[str, torch.Tensor]) -> None:
        """Add the change of each to the other. Collective over world; call `weights_changed()` afterwards."""
        for view in self.views:
            total = self._change(view.first, view.shape, before)
            for name, transposed in view.others:
                more = self._change(name, view.shape[::-1] if transposed else view.shape, before)
                total += more.t() if transposed else more
            for name, transposed in ((view.first, False), *view.others):
                self._set(name, before, total.t() if transposed else total)

    def _change(self, name: str, shape: tuple[int, ...], before: dict[str, torch.Tensor]) -> torch.Tensor:
        """What the step has added to a parameter, whole. Collective over the ranks that hold it, and over pp."""
        whole = torch.zeros(shape, dtype=torch.float32, device=self.mesh.device)
        if name in self._places:
            group, index = self._places[name]
            slot = group.layout.slots[index]
            start, stop = group.fragment(slot)
            part = torch.zeros(slot.numel, dtype=torch.float32, device=self.mesh.device)
            offset = group.resting[0] + start - slot.offset
            if stop > start:
                with opened(group.master) as masters:
                    part[offset : offset + stop - start] = (masters[start:stop] - before[name]).to(part)
            if group.resting != (0, group.layout.numel):
                for axis in group.axes.among:
                    collectives.all_reduce(axis, part, op="sum").wait()
            whole = joined(group, index, part.view(slot.shape)).contiguous()
        if self.mesh.pp.size > 1:
            collectives.broadcast(self.mesh.pp, whole, self._stages[name])
        return whole

    def _set(self, name: str, before: dict[str, torch.Tensor], change: torch.Tensor) -> None:
        if name not in self._places:
            return
        group, index = self._places[name]
        slot = group.layout.slots[index]
        start, stop = group.fragment(slot)
        offset = group.resting[0] + start - slot.offset
        own = slot.held.take(change).reshape(-1)[offset : offset + stop - start]
        with opened(group.master, changed=True) as masters:
            masters[start:stop] = before[name] + own.to(before[name])
        group.masters_changed()
        group.write_back()
        group.rest.storage.link.wait_device()
