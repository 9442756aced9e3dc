"""Makes a model's outputs whole: the loss of all ranks, and other tensors if they are read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from hf_dist.errors import ModelError
from hf_dist.parallel.sequence.exchange import total_loss, whole
from hf_dist.parallel.sequence.inputs import Cut
from hf_dist.tensors import pytree
from hf_dist.tensors.deferred_tensor import UnreadTensor, unread


class WholeTensor(UnreadTensor):
    """A tensor over all positions of which this rank has a part; the other parts are gathered when it is read.

    Either all ranks that share the sequence read it, or none.
    """

    _gather: Callable[[], torch.Tensor]
    _full: torch.Tensor | None

    @staticmethod
    def of(part: torch.Tensor, shape: tuple[int, ...], gather: Callable[[], torch.Tensor]) -> WholeTensor:
        """`gather()`: returns the tensor of `shape`, with its graph."""
        lazy: Any = unread(shape, part.dtype, _REFUSAL, part).as_subclass(WholeTensor)
        lazy._gather, lazy._full = gather, None
        return lazy

    def read_by(self, function: Callable[..., object]) -> torch.Tensor:
        """The plain tensor. The first call is collective over the ranks that share the sequence."""
        if self._full is None:
            with torch.set_grad_enabled(self.requires_grad):
                self._full = self._gather()
        return self._full


class PartTensor(UnreadTensor):
    """An output that is another one on parts of a sequence: reading it raises, with what differs."""

    _problem: str

    @staticmethod
    def of(part: torch.Tensor, name: str, problem: str) -> PartTensor:
        """In place of the output `name`."""
        made: Any = unread(tuple(part.shape), part.dtype, _REFUSAL, part).as_subclass(PartTensor)
        made._problem = (
            f"sequence_parallel_size: {name} of a split model is not that of the model ({problem}). Do not use it, or remove "
            "the key."
        )
        return made

    def read_by(self, function: Callable[..., object]) -> torch.Tensor:
        """Raises `ModelError`."""
        raise ModelError(self._problem)


_LOSSES = ("loss", "aux_loss")
"""Outputs of which each rank has a part."""
_KEPT = ("logits", "last_hidden_state")
"""Outputs of which the caller's `logits_to_keep` keeps the last positions, where a forward takes it."""
_REFUSAL = (
    "sequence_parallel_size: logits went into a custom autograd Function (a fused loss kernel?) before they were whole. Call "
    ".contiguous() on them first."
)


def whole_outputs(output: object, cut: Cut, *, is_mean: bool, at_once: bool, parts: Mapping[str, str]) -> object:
    """`output` of a split forward, as one process would return it. A ModelOutput is changed in place.

    `is_mean`: whether the loss is a mean over this rank's labels; `at_once`: whether tensors are certainly read; `parts`:
    outputs that must not be read, and why.
    """
    if isinstance(output, dict):
        source = cut if cut.forward.source is None else replace(cut, forward=cut.forward.source)
        for key, value in list(output.items()):
            own = source if key.startswith("encoder_") else cut
            if key in parts:
                output[key] = pytree.mapped(functools.partial(_refused, key, parts[key]), value)
                continue
            output[key] = _whole_value(
                value, own, key in _LOSSES, is_mean and key == "loss", at_once, logits=key in _KEPT
            )
        return output
    if isinstance(output, tuple):
        if named := [key for key in parts if not key.isdigit()]:
            raise ModelError(
                f"sequence_parallel_size: without names (return_dict=False) an output that must not be read ({named[0]}: "
                f"{parts[named[0]]}) cannot be told from others. Leave return_dict out, or remove the key."
            )
        has_loss = cut.share is not None
        return tuple(
            pytree.mapped(functools.partial(_refused, str(i), parts[str(i)]), v)
            if str(i) in parts
            else _whole_value(v, cut, has_loss and i == 0, is_mean, at_once, logits=i == int(has_loss))
            for i, v in enumerate(output)
        )
    return _whole_value(output, cut, False, is_mean, at_once, logits=False)


def _refused(name: str, problem: str, value: object) -> object:
    return PartTensor.of(value, name, problem) if isinstance(value, torch.Tensor) else value


def _whole_value(value: object, cut: Cut, is_loss: bool, is_mean: bool, at_once: bool, *, logits: bool) -> object:
    if isinstance(value, tuple):
        return tuple(_whole_value(v, cut, False, is_mean, at_once, logits=False) for v in value)
    if not isinstance(value, torch.Tensor):
        return value
    if is_loss:
        return _whole_loss(value, cut, is_mean)
    forward = cut.forward
    rows = next((x.shape[0] for x in cut.kwargs.values() if isinstance(x, torch.Tensor) and x.dim() > 1), 0)
    if value.dim() == 2 and value.shape[0] == rows * len(forward.own):  # a row per token: what routers give

        def gather_tokens() -> torch.Tensor:
            order = forward.axes.layout.undo_on(value.device, forward.length)
            full = whole(forward.axes.cp, value.view(rows, -1, value.shape[1]), order, forward.real_length)
            return full.reshape(-1, value.shape[1])

        return WholeTensor.of(value, (rows * forward.real_length, value.shape[1]), gather_tokens)
    if value.dim() < 2 or value.shape[1] != len(forward.own):
        return value
    axes, length, kept = forward.axes, forward.real_length, cut.kept if logits else None

    def gather() -> torch.Tensor:
        full = whole(axes.cp, value, axes.layout.undo_on(value.device, forward.length), length)
        return full if kept is None else full[:, _kept_positions(kept), :]

    if value.dim() == 2 and cut.shifted:  # one number per label: where the model shifts, the last token has none
        return gather()[:, :-1]
    if at_once or value.dim() == 2:
        return gather()
    count = length if kept is None else _num_kept(kept, length)
    return WholeTensor.of(value, (value.shape[0], count, *value.shape[2:]), gather)


def _whole_loss(loss: torch.Tensor, cut: Cut, is_mean: bool) -> torch.Tensor:
    if is_mean and cut.share is not None:
        # A part without labels has no mean; its nan must not reach the sum.
        loss = torch.where(cut.share > 0, loss, torch.zeros_like(loss)) * cut.share.to(loss.dtype)
    return total_loss(cut.forward.axes.cp, loss)


def _kept_positions(kept: Any) -> Any:
    return kept if isinstance(kept, torch.Tensor) else slice(-kept if kept else None, None)


def _num_kept(kept: Any, length: int) -> int:
    if isinstance(kept, torch.Tensor):
        return kept.numel()
    return min(int(kept), length) if kept else length
