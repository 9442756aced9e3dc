"""Weights that user code writes into parameters: `p.data.copy_(x)`, `p.add_(x)`, `p.data = x`, a custom initialisation."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence

import torch
from torch import nn

from hf_dist.errors import ModelError
from hf_dist.sharding.layout import FlatLayout
from hf_dist.sharding.prepared import OWNER, raw_data

_VERSION = operator.attrgetter("_version")


class UserWrites:
    """Notices writes into the parameters of one group while its full weights are in memory. Local."""

    def __init__(self, params: Sequence[nn.Parameter], layout: FlatLayout, full: torch.Tensor) -> None:
        """`full`: the flat buffer whose views the parameters are."""
        self._params = params
        self._layout = layout
        self._full = full
        self._version: int | None = None
        self._data_was_used = False
        self._aliases: dict[int, weakref.ref[torch.Tensor]] = {}

    def note_alias(self, alias: torch.Tensor) -> None:
        """Note that user code has read some `p.data`: writes through it leave no trace, for as long as it is kept."""
        self._data_was_used = True
        key, aliases = id(alias), self._aliases
        aliases[key] = weakref.ref(alias, lambda _: aliases.pop(key, None))

    def note_assignment(self, param: torch.Tensor, value: torch.Tensor) -> None:
        """Note that user code sets `param.data`, and give what it has read of it before, and still holds, memory of its own.

        In torch the elements that were read stay (`backup = p.data; p.data = averaged; ...; p.data = backup`). Here the new
        ones are copied to where the old ones are (`take_back`), which a collective has to find in one buffer.
        """
        place, numel = raw_data(param).data_ptr(), param.numel()
        self._data_was_used = True  # after the read, which may have waited for weights, which forgets earlier notes
        first = self._full.data_ptr()
        inside = first <= place < first + self._full.untyped_storage().nbytes()
        if not inside or value.data_ptr() == place:
            return
        for alias in self.aliases:
            own = raw_data(alias)
            if own.data_ptr() == place and own.numel() == numel:
                self._aliases.pop(id(alias), None)
                delattr(alias, OWNER)
                alias.data = own.clone()

    @property
    def aliases(self) -> list[torch.Tensor]:
        """What user code has read as `p.data` and still holds."""
        if not self._aliases:  # asked whenever weights are freed
            return []
        held = [reference() for reference in list(self._aliases.values())]
        return [alias for alias in held if alias is not None]

    def watch(self) -> None:
        """Treat the weights as unwritten from now on: discard what user code has written so far."""
        self._version, self._data_was_used = self._count(), False

    def stop(self) -> None:
        """Notice nothing until the next `watch`."""
        self._version = None

    @property
    def happened(self) -> bool:
        """Whether user code may have written since `watch`."""
        if self._version is None:
            return False
        return self._data_was_used or bool(self._aliases) or self._count() != self._version

    @property
    def counted(self) -> bool:
        """Whether an operator has written into a parameter since `watch`."""
        return self._version is not None and self._count() != self._version

    def _count(self) -> int:
        """A number that grows whenever an operator writes into a parameter. Each view of `full` has its own counter."""
        return sum(map(_VERSION, self._params))  # of every group after every backward: no frame of Python for each

    @torch.no_grad()
    def take_back(self) -> bool:
        """Copy parameters that user code re-pointed (`p.data = ...`) into `full` and make them views again; True if any.

        The full weights must be in memory. Raises `ModelError` for elements of another shape.
        """
        moved = False
        for slot, p in zip(self._layout.slots, self._params, strict=True):
            view = self._full[slot.offset : slot.stop].view(slot.shape)
            if p.data_ptr() != view.data_ptr() and slot.numel:
                if p.shape != view.shape:
                    raise ModelError(f"{slot.name} was given elements of shape {tuple(p.shape)}, it has {slot.shape}")
                view.copy_(raw_data(p))
                p.data, moved = view, True
        return moved
