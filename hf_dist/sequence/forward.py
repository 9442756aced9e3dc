"""One forward on a part of each sequence: what every rank knows of the whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_dist.errors import ModelError
from hf_dist.mesh import MeshAxis
from hf_dist.sequence.layout import SequenceLayout


@dataclass(frozen=True, eq=False)
class SequenceAxes:
    """The ranks that share a sequence, and how."""

    cp: MeshAxis
    """All of them."""
    ulysses: MeshAxis
    """Neighbours that exchange heads for positions."""
    outer: MeshAxis
    """One of each such group: they gather keys and values, or pass them on."""
    layout: SequenceLayout


@dataclass(eq=False)
class SplitForward:
    """What is known of the whole sequence while a part of it is computed on."""

    axes: SequenceAxes
    length: int
    """Tokens of a row, padded to what the layout divides."""
    real_length: int
    """As they were given."""
    attention_mask: torch.Tensor | None
    """(B, length), bool: which tokens may be attended to; None where all may."""
    position_ids: torch.Tensor
    """(1 or B, length)."""
    documents: torch.Tensor | None
    """(B, length): the number of the packed document that a token belongs to; None where rows are not packed."""
    source: SplitForward | None = None
    """Of a decoder: its encoder's."""
    target: Callable[[], SplitForward | None] | None = None
    """Of an encoder that runs: its decoder's."""
    num_calls: int = 0
    """Calls of attention so far."""
    own: torch.Tensor = field(init=False)
    """(s,) positions of this rank."""

    def __post_init__(self) -> None:
        device = self.position_ids.device
        self.own = self.axes.layout.positions_on(device, self.axes.cp.rank, self.length)


class _Current(threading.local):
    forward: SplitForward | None = None


_current = _Current()


def current() -> SplitForward | None:
    """The split forward that this thread is in, None outside of one. A block that backward recomputes is not in one: it
    finds the forward in its mask."""
    return _current.forward


def enter(forward: SplitForward | None) -> None:
    """From here on this thread is in `forward`."""
    _current.forward = forward


_silent = False


@contextmanager
def silenced() -> Iterator[None]:
    """Inside, attention and its kin of whole rows answer zeros: what then still depends on other positions is neither."""
    global _silent
    _silent = True
    try:
        yield
    finally:
        _silent = False


def is_silent() -> bool:
    """Whether attention of whole rows answers zeros."""
    return _silent


Rule = Callable[..., torch.Tensor]
"""(batch, head, query, key) indices that broadcast -> whether the query may attend to the key."""


def in_backward() -> bool:
    """Whether this thread is inside a backward, which then runs a block again."""
    return bool(torch._C._current_graph_task_id() != -1)


class SequenceMask:
    """What the model hands to its attention as the mask: the rule for the whole sequence, and who makes a mask of it."""

    def __init__(
        self,
        forward: SplitForward,
        rule: Rule,
        make: Callable[..., Any],
        *,
        is_causal: bool = False,
        is_cross: bool = False,
    ) -> None:
        """`make(q_length=, q_offset=)`: the mask of some rows, as the kernel under use wants it; `is_causal`: the rule is to
        look back, and nothing else; `is_cross`: keys are those of an encoder."""
        self.is_causal, self.is_cross = is_causal, is_cross
        self.forward = forward
        self.rule = rule
        self._make = make
        self._made: dict[Any, Any] = {}

    def whole(self) -> Any:
        """The mask of all queries and keys."""
        return self.rows(0, self.forward.length)

    def rows(self, start: int, length: int) -> Any:
        """That of `length` queries from `start` on, and all keys."""
        return self.kept((start, length), lambda: self._make(q_length=length, q_offset=start))

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make()` returned for `key`, for all layers that share this mask."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _refuse(self, what: str) -> Any:
        raise ModelError(
            f"sequence_parallel_size: the model reads {what} of its attention mask, which is that of a part of the sequence "
            "here: attention of its own kind cannot be split over ranks. Remove the key."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse(f".{name}")

    def __getitem__(self, index: Any) -> Any:
        return self._refuse("elements")

    def __add__(self, other: Any) -> Any:
        return self._refuse("the values")

    __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __invert__ = __add__
