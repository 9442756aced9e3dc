"""Runs layers that mix positions by heads or channels on whole rows, for this rank's share of heads or channels.

As in Ulysses attention, the projections run on this rank's positions, their outputs are sent to the ranks of their heads,
the layer's own code runs on all positions of these heads, and the result is sent back. The layer's own forward is called
with a view of the layer that has this rank's heads. Nothing is replaced, and outside of a split forward nothing changes.
"""

from __future__ import annotations

import inspect
import types
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from hf_dist.parallel.sequence import forward as split_forward
from hf_dist.parallel.sequence.exchange import all_parts, gather_keys, to_heads, to_positions
from hf_dist.parallel.sequence.forward import SequenceAxes, SequenceMask
from hf_dist.parallel.sequence.mixers import Share, share_of

_OF_POSITIONS = ("attention_mask", "position_ids", "seq_idx")
"""Arguments with one number per position."""


def hold_whole_rows(model: nn.Module, axes: SequenceAxes, counted: object) -> int:
    """Make such layers of `model` work on whole rows in a split forward. Returns their number. Local.

    `counted()` is called at each of their calls. Raises `ModelError` for heads that the ranks cannot share.
    """
    count = 0
    for module in model.modules():
        shares = [share_of(module, rank, axes.cp.size) for rank in range(axes.cp.size)]
        own = shares[axes.cp.rank]
        if own is not None:
            plan = _Plan(axes, own, _all_sends(shares))
            module.forward = types.MethodType(_forward_of(type(module), plan, weakref.WeakMethod(counted)), module)
            count += 1
    return count


def _all_sends(shares: list[Any]) -> dict[str, torch.Tensor]:
    """(ranks, c) channels for every projection."""
    found = {name: torch.stack([s.sends[name] for s in shares]) for name in shares[0].sends}
    for name in shares[0].inside:
        found |= {f"{name}.{key}": value for key, value in _all_sends([s.inside[name] for s in shares]).items()}
    return found


class _Plan:
    """The data for the views of one layer."""

    def __init__(self, axes: SequenceAxes, share: Share, sends: dict[str, torch.Tensor]) -> None:
        self.axes, self.share, self.sends = axes, share, sends
        self._moved: dict[torch.device, _Plan] = {}

    def on(self, device: torch.device) -> _Plan:
        """The same plan with its indices on `device`."""
        if device not in self._moved:
            sends = {name: index.to(device) for name, index in self.sends.items()}
            self._moved[device] = _Plan(self.axes, _share_on(self.share, device), sends)
        return self._moved[device]

    def __deepcopy__(self, memo: object) -> _Plan:
        return self  # process groups are shared


def _share_on(share: Share, device: torch.device) -> Share:
    return replace(
        share,
        rows={name: index.to(device) for name, index in share.rows.items()},
        slices={name: (dim, index.to(device)) for name, (dim, index) in share.slices.items()},
        inside={name: _share_on(each, device) for name, each in share.inside.items()},
    )


def _forward_of(cls: Any, plan: _Plan, counted: Any) -> Any:
    own = cls.forward
    names = tuple(inspect.signature(own).parameters)[1:]

    def forward(self: nn.Module, *args: object, **kwargs: Any) -> object:
        # A block recomputed in backward is in no forward. Only forwards on parts are recomputed; others have no gradient.
        if split_forward.current() is None and not split_forward.in_backward():
            result = own(self, *args, **kwargs)
            return tree_map(_zeros, result) if split_forward.is_silent() else result
        note = counted()
        if note is not None:
            note()
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return _Rows(self, plan, given.pop(names[0])).run(own, given)

    return forward


def _zeros(value: object) -> object:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


class _Rows:
    """One call of a layer: its input on this rank's positions, and the exchange of tensors to heads and back."""

    def __init__(self, module: nn.Module, plan: _Plan, hidden: torch.Tensor) -> None:
        self.module, self.plan, self.hidden = module, plan.on(hidden.device), hidden
        axes = plan.axes
        self.length = hidden.shape[1] * axes.cp.size
        self.own = axes.layout.positions_on(hidden.device, axes.cp.rank, self.length)
        self.undo = axes.layout.undo_on(hidden.device, self.length)

    def run(self, forward: Any, given: dict[str, Any]) -> object:
        """Run the layer's `forward` on all positions, with the factors it multiplies its input by (padding) as input."""
        inner = {name: self._of_all(name, value) for name, value in given.items() if name != "attention_mask"}
        mask = given.get("attention_mask")
        inner["attention_mask"] = mask if isinstance(mask, SequenceMask) else self._mask(mask)
        factors = self.hidden.new_ones((self.hidden.shape[0], self.length, 1))
        return forward(_View(self, self.module, self.plan.share, ""), factors, **inner)

    def _of_all(self, name: str, value: object) -> Any:
        if name not in _OF_POSITIONS or not isinstance(value, torch.Tensor) or value.shape[-1] != len(self.own):
            return value
        whole = all_parts(self.plan.axes.cp, value.contiguous()).movedim(0, 1).flatten(1, 2)
        return self._in_order(whole)

    def _mask(self, mask: torch.Tensor | None) -> torch.Tensor:
        """(B, S); ones if nothing is padded, because a recomputed block must do the same again.

        A rank whose part has no padding got None, while other ranks got a mask.
        """
        shape, forward = (self.hidden.shape[0], self.length), split_forward.current()
        if forward is None:
            ones = self.hidden.new_ones(self.hidden.shape[:2])
            found: torch.Tensor = self._of_all("attention_mask", ones if mask is None else mask.to(ones.dtype))
            return found
        whole = forward.attention_mask
        return self.hidden.new_ones(shape) if whole is None else whole.to(self.hidden.dtype)

    def _in_order(self, whole: torch.Tensor) -> torch.Tensor:
        return whole if self.undo is None else whole.index_select(1, self.undo)

    def read(self, given: torch.Tensor) -> torch.Tensor:
        """The input of a projection: this rank's part of the layer's input, for factors over all positions."""
        return self.hidden * given[:, self.own] if given.shape[1] == self.length else given

    def to_heads(self, part: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
        """(B, s, C) -> (B, S, c): this rank's channels for all positions; `channels`: (ranks, c)."""
        ranks, count = channels.shape
        sent = part.index_select(-1, channels.flatten()).unflatten(-1, (ranks, count))
        (whole,) = to_heads(self.plan.axes.cp, sent.transpose(1, 2))
        return self._in_order(whole.squeeze(1))

    def to_positions(self, whole: torch.Tensor) -> torch.Tensor:
        """(B, S, c) -> (B, s, C)."""
        if whole.dim() != 3 or whole.shape[1] != self.length:
            return whole
        if self.undo is not None:
            whole = whole.index_select(1, torch.argsort(self.undo))
        return to_positions(self.plan.axes.cp, whole.unsqueeze(1)).transpose(1, 2).flatten(2)

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """(B, s, C) -> (B, S, C)."""
        return self._in_order(gather_keys(self.plan.axes.cp, part.unsqueeze(1)).squeeze(1))


class _View:
    """A layer as its own code sees it: with this rank's heads, and projections whose outputs are sent to the heads' ranks."""

    training = False
    """False, because fused training kernels include the layer's last product, which is not part of the share."""

    def __init__(self, rows: _Rows, module: nn.Module, share: Share, prefix: str) -> None:
        self.__dict__.update(_rows=rows, _module=module, _share=share, _prefix=prefix, **share.sizes)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return type(self._module).forward(self, *args, **kwargs)

    def __setattr__(self, name: str, value: object) -> None:
        if value is None:  # generation states: dropped in training; they do not belong to some heads only
            setattr(self._module, name, None)

    def __getattr__(self, name: str) -> Any:
        rows, module, share = (self.__dict__[key] for key in ("_rows", "_module", "_share"))
        value = getattr(module, name)
        if name in share.inside:
            return _View(rows, value, share.inside[name], f"{self._prefix}{name}.")
        if name in share.sends:
            channels = rows.plan.sends[self._prefix + name]
            return lambda x: rows.to_heads(value(rows.read(x)), channels)
        if name in share.local:
            return lambda x: value(rows.read(x))
        if name in share.back:
            return lambda *xs: value(*map(rows.to_positions, xs))
        if name in share.narrow:
            return lambda x: rows.gathered(value(rows.to_positions(x)))
        if name in share.rows:
            return _SomeRows(value, share.rows[name])
        if name in share.slices:
            dim, index = share.slices[name]
            return value.index_select(dim, index)
        if isinstance(value, types.MethodType) and value.__self__ is module:
            return types.MethodType(value.__func__, self)
        return value


class _SomeRows:
    """A per-channel convolution along positions, or a product, of which only some rows are computed."""

    def __init__(self, module: Any, index: torch.Tensor) -> None:
        self.weight = module.weight.index_select(0, index)
        self.bias = None if module.bias is None else module.bias.index_select(0, index)
        self.padding = getattr(module, "padding", 0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.dim() == 2:
            return functional.linear(x, self.weight, self.bias)
        return functional.conv1d(x, self.weight, self.bias, padding=self.padding, groups=len(self.weight))
