"""Lazy logits: they record the operations applied to them until a cross-entropy consumes them.

The hidden states enter the head as `LinearInput`, and `linear` returns `LazyLogits`. These record element-wise operations with
numbers (soft-capping, scaling, casts) and operations on rows (views, the shift by one). Any other operation reads them: they
then become plain logits with the usual graph. They hold one of two heads:

    Computed    the product, computed at once; `cross_entropy` processes it in chunks (`chunks.py`)
    Linear      the deferred product; `cross_entropy` computes it in tiles, never whole (`tiles.py`)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from hf_dist.errors import ModelError
from hf_dist.memory.loss.chunks import Cast, Computed
from hf_dist.memory.loss.tiles import Linear, saves_memory, tiled_cross_entropy
from hf_dist.memory.loss.vocabulary import VocabularySplit
from hf_dist.tensors.deferred_tensor import UnreadTensor, unread
from hf_dist.tensors.linear_input import LinearInput

_FIX = 'Read them before backward, or set "hf_dist": {"tiled_loss": false}.'


@dataclass(eq=False)
class Use:
    """State of the logits of one call of the head."""

    on_read: Callable[[str], None]
    """Called with the function's name when code other than the loss reads deferred logits."""
    tiles: bool = True
    """Whether the product may be deferred if that saves memory."""
    always: bool = False
    """Whether it is deferred in any case: the loss that follows takes nothing else."""
    split: VocabularySplit | None = None
    """How the vocabulary is split, if the head has some of its rows."""
    has_loss: bool = False
    """Whether a cross-entropy has consumed the logits."""
    gone: bool = False
    """Whether the pass is over, so that weights may be freed or changed."""

    def end(self) -> None:
        """End the pass: no backward needs the weights any more."""
        self.gone = True


def marked(hidden: torch.Tensor, use: Use) -> LinearInput:
    """`hidden`, marked so that `linear` of it returns lazy logits. For one call of the head."""
    return LinearInput.of(hidden, lambda x, weight, bias: _logits_of(Linear(x, weight, bias, split=use.split), use))


def _logits_of(head: Linear, use: Use) -> LazyLogits:
    vocabulary, width = head.vocabulary, head.weight.shape[1]
    learns = torch.is_grad_enabled() and head.weight.requires_grad
    itemsize = head.hidden.dtype.itemsize
    if use.always or (
        use.tiles and saves_memory(head.hidden.numel() // width, vocabulary, width, itemsize, learns=learns)
    ):
        return LazyLogits.of(head, use, head.hidden.dtype)
    computed = head.computed()
    return LazyLogits.of(computed, use, computed.logits.dtype)


_INTO_A_FUNCTION = (
    "hf_dist.tiled_loss: the logits went into a custom autograd Function (a fused loss kernel?), which tiles cannot "
    'follow. Set "hf_dist": {"tiled_loss": false}.'
)


class LazyLogits(UnreadTensor):
    """A tensor with the shape and dtype of logits (..., V); it has their memory only if `is_plain`."""

    _head: Linear | Computed
    _use: Use
    _full: torch.Tensor | None

    @staticmethod
    def of(head: Linear | Computed, use: Use, dtype: torch.dtype) -> LazyLogits:
        """Lazy logits of `head` in `dtype`."""
        plain: object
        if isinstance(head, Linear):
            vocabulary = head.weight.shape[0] if head.split is None else head.split.whole
            shape = (*head.hidden.shape[:-1], vocabulary)
            plain = unread(shape, dtype, _INTO_A_FUNCTION, head.hidden, head.weight, head.bias)
        elif head.split is not None:
            plain = unread((*head.logits.shape[:-1], head.split.whole), dtype, _INTO_A_FUNCTION, head.logits)
        else:
            shape = tuple(head.logits.shape)
            plain = unread(shape, dtype, _INTO_A_FUNCTION, head.logits) if head.after else head.logits
        lazy: Any = plain.as_subclass(LazyLogits)
        lazy._head, lazy._use, lazy._full = head, use, None
        return lazy

    @property
    def put_off(self) -> bool:
        """Whether the product is deferred."""
        return isinstance(self._head, Linear)

    def taken(self) -> Linear:
        """The deferred product with what was done to it, for a loss of another kind, which it now has."""
        assert isinstance(self._head, Linear), "only `Use.always` promises one"
        self._use.has_loss = True
        return self._head

    @property
    def vocabulary_split(self) -> VocabularySplit | None:
        """How the vocabulary is split over ranks; None if it is not."""
        return self._head.split

    @property
    def columns(self) -> int:
        """Columns of the logits that this rank has."""
        return self._head.weight.shape[0] if isinstance(self._head, Linear) else self._head.logits.shape[-1]

    @property
    def over(self) -> Callable[[], None]:
        """To be called when the backward of its loss passes through."""
        return self._use.end

    @property
    def is_plain(self) -> bool:
        """Whether these are the head's results without pending operations."""
        return isinstance(self._head, Computed) and not self._head.after and self._head.split is None

    def full(self) -> torch.Tensor:
        """The logits as a plain tensor. Raises `ModelError` if they were deferred and their pass is over."""
        if self._full is None:
            if self.put_off and self._use.gone:
                raise ModelError(f"hf_dist.tiled_loss: logits were read after backward, and they were not kept. {_FIX}")
            self._full = self._head.full()
        return self._full

    def read_by(self, function: Callable[..., object]) -> torch.Tensor:
        """`full`, for code other than the loss."""
        full = self.full()
        if self.put_off:
            self._use.on_read(getattr(function, "__name__", str(function)))
        return full

    @classmethod
    def unread_result(cls, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """What keeps them lazy, or takes them as the loss does."""
        lazy = args[0] if args else None
        handler = _HANDLERS.get(func)
        if handler is None or not isinstance(lazy, LazyLogits) or lazy._full is not None or lazy._use.gone:
            return NotImplemented
        return handler(func, lazy, *args[1:], **kwargs)


# ---- handlers that keep logits lazy; each returns NotImplemented if it cannot


def _elementwise(func: Callable[..., Any], lazy: LazyLogits, *args: object, **kwargs: object) -> object:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and (value.dim() > 0 or value.requires_grad):
            return NotImplemented
    sample = func(torch.empty(0, dtype=lazy.dtype, device=lazy.device), *args, **kwargs)
    if sample.device != lazy.device or not sample.is_floating_point():
        return NotImplemented

    def step(logits: torch.Tensor) -> torch.Tensor:
        return func(logits, *args, **kwargs)

    if func in _CASTS:
        step = Cast(sample.dtype)
    return LazyLogits.of(replace(lazy._head, after=(*lazy._head.after, step)), lazy._use, sample.dtype)


def _reshaped(func: Callable[..., Any], lazy: LazyLogits, *args: object, **kwargs: object) -> object:
    if args and isinstance(args[0], torch.dtype):
        return NotImplemented
    shape = func(torch.empty(lazy.shape, device="meta"), *args, **kwargs).shape
    if shape[-1] != lazy.shape[-1]:
        return NotImplemented
    head = lazy._head.rows(lambda t: t.reshape(*shape[:-1], t.shape[-1]))
    return LazyLogits.of(head, lazy._use, lazy.dtype)


def _unchanged(func: Callable[..., object], lazy: LazyLogits, *args: object, **kwargs: object) -> object:
    return lazy


def _indexed(func: Callable[..., object], lazy: LazyLogits, index: Any) -> object:
    """Select rows by slices, masks or indices; the last dimension must stay whole."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(not isinstance(e, (slice, torch.Tensor)) and e is not Ellipsis for e in entries):
        return NotImplemented
    used = sum(e.dim() if isinstance(e, torch.Tensor) and e.dtype == torch.bool else 1 for e in entries)
    used -= sum(e is Ellipsis for e in entries)
    rest = [slice(None)] * (lazy.dim() - used)
    if not any(e is Ellipsis for e in entries):
        entries.append(Ellipsis)
    at = next(i for i, e in enumerate(entries) if e is Ellipsis)
    entries[at : at + 1] = rest
    if not entries or not isinstance(entries[-1], slice) or entries[-1] != slice(None):
        return NotImplemented
    rows = tuple(entries[:-1])
    return LazyLogits.of(lazy._head.rows(lambda t: t[rows]), lazy._use, lazy.dtype)


def _cross_entropy(func: Callable[..., object], lazy: LazyLogits, target: Any, **kwargs: Any) -> object:
    wanted = {"reduction": "mean", "ignore_index": -100, **kwargs}
    plain = not wanted.get("label_smoothing")
    plain &= all(wanted.get(key) is None for key in ("weight", "size_average", "reduce"))
    if not plain or wanted["reduction"] not in ("mean", "sum") or lazy.dim() != 2 or target.dim() != 1:
        return NotImplemented
    if isinstance(target, LazyLogits) or target.dtype != torch.int64 or len(target) != len(lazy):
        return NotImplemented
    lazy._use.has_loss = True
    ignore_index, mean = wanted["ignore_index"], wanted["reduction"] == "mean"
    if isinstance(lazy._head, Computed):
        return lazy._head.cross_entropy(target, ignore_index=ignore_index, mean=mean)
    return tiled_cross_entropy(
        lazy._head, target, ignore_index=ignore_index, mean=mean, dtype=lazy.dtype, over=lazy._use.end
    )


def _handlers() -> dict[object, Callable[..., object]]:
    tensor = torch.Tensor
    found: dict[object, Callable[..., object]] = {
        functional.cross_entropy: _cross_entropy,
        tensor.__getitem__: _indexed,
    }
    for name in ("div", "mul", "tanh", "true_divide"):
        found[getattr(torch, name)] = found[getattr(tensor, name)] = _elementwise
    for name in ("float", "bfloat16", "half", "to", "__truediv__", "__mul__", "__rmul__"):
        found[getattr(tensor, name)] = _elementwise
    for name in ("view", "reshape", "flatten"):
        found[getattr(tensor, name)] = _reshaped
    found[torch.reshape] = found[torch.flatten] = _reshaped
    found[tensor.contiguous] = _unchanged
    return found


_CASTS = frozenset(getattr(torch.Tensor, name) for name in ("float", "bfloat16", "half", "to"))
_HANDLERS = _handlers()
