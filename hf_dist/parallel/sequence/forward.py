"""One forward on a part of each sequence, and what every rank knows about the whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hf_dist.dist.mesh import MeshAxis
from hf_dist.errors import ModelError
from hf_dist.parallel.sequence.layout import SequenceLayout


@dataclass(frozen=True, eq=False)
class SequenceAxes:
    """The ranks that share a sequence, and how they share it."""

    cp: MeshAxis
    """All of them."""
    ulysses: MeshAxis
    """Neighbouring ranks that exchange heads for positions."""
    outer: MeshAxis
    """One rank of each Ulysses group: they gather keys and values, or pass them round a ring."""
    layout: SequenceLayout


@dataclass(eq=False)
class SplitForward:
    """Facts about the whole sequence during a forward on a part of it."""

    axes: SequenceAxes
    length: int
    """Tokens of a row, padded to a length that the layout divides."""
    real_length: int
    """Tokens of a row before padding."""
    attention_mask: torch.Tensor | None
    """(B, length), bool: which tokens may be attended to; None if all may."""
    position_ids: torch.Tensor
    """(1 or B, length)."""
    documents: torch.Tensor | None
    """(B, length): number of the packed document of each token; None if rows are not packed."""
    source: SplitForward | None = None
    """For a decoder: its encoder's forward."""
    target: Callable[[], SplitForward | None] | None = None
    """For a running encoder: its decoder's forward."""
    num_calls: int = 0
    """Number of attention calls so far."""
    own: torch.Tensor = field(init=False)
    """(s,) positions of this rank."""

    def __post_init__(self) -> None:
        device = self.position_ids.device
        self.own = self.axes.layout.positions_on(device, self.axes.cp.rank, self.length)


class _Current(threading.local):
    forward: SplitForward | None = None


_current = _Current()


def current() -> SplitForward | None:
    """The split forward that this thread is in, None outside of one. A block recomputed in backward is in none: it
    finds the forward in its mask."""
    return _current.forward


def axis_under_way() -> MeshAxis | None:
    """The ranks that share the rows of this thread's forward; None outside of a split forward."""
    found = current()
    return None if found is None else found.axes.cp


def enter(forward: SplitForward | None) -> None:
    """Set the forward that this thread is in."""
    _current.forward = forward


_silent = False


@contextmanager
def silenced() -> Iterator[None]:
    """Inside, attention and other mixers of whole rows return zeros, so that only other kinds of mixing remain visible."""
    global _silent
    _silent = True
    try:
        yield
    finally:
        _silent = False


def is_silent() -> bool:
    """Whether attention of whole rows returns zeros."""
    return _silent


Rule = Callable[..., torch.Tensor]
"""(batch, head, query, key) indices that broadcast -> whether the query may attend to the key."""


def in_backward() -> bool:
    """Whether this thread is inside a backward, which then recomputes a block."""
    return bool(torch._C._current_graph_task_id() != -1)


class SequenceMask:
    """The mask that the model passes to its attention: the rule for the whole sequence, and the function that makes a mask."""

    def __init__(
        self,
        forward: SplitForward,
        rule: Rule,
        make: Callable[..., object],
        *,
        is_causal: bool = False,
        is_cross: bool = False,
    ) -> None:
        """`make(q_length=, q_offset=)`: the mask of some rows, in the form of the kernel in use; `is_causal`: the rule is plain
        causal attention; `is_cross`: the keys belong to an encoder."""
        self.is_causal, self.is_cross = is_causal, is_cross
        self.forward = forward
        self.rule = rule
        self._make = make
        self._made: dict[object, object] = {}

    def whole(self) -> object:
        """The mask of all queries and keys."""
        return self.rows(0, self.forward.length)

    def rows(self, start: int, length: int) -> object:
        """The mask of `length` queries from `start` on, and all keys."""
        return self.kept((start, length), lambda: self._make(q_length=length, q_offset=start))

    def kept(self, key: object, make: Callable[[], object]) -> object:
        """The result of `make()` for `key`, shared by all layers with this mask."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _refuse(self, what: str) -> object:
        raise ModelError(
            f"sequence_parallel_size: the model reads {what} of its attention mask, which is that of a part of the sequence "
            "here: attention of its own kind cannot be split over ranks. Remove the key."
        )

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse(f".{name}")

    def __getitem__(self, index: object) -> object:
        return self._refuse("elements")

    def __add__(self, other: object) -> object:
        return self._refuse("the values")

    __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __invert__ = __add__
