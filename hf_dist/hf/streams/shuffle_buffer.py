"""The shuffle buffer of a `datasets.IterableDataset` with a state: what it holds, and how it draws.

That of `datasets` loses its rows on a resume and fills again with others. Here a state has the rows that were left when the
buffer was filled last, the generator and the inner state of that moment, and how many rows were given since. Same order as
`datasets` 5.2 gives for rows that are not Arrow tables. Source: `BufferShuffledExamplesIterable`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

__all__ = ["Held", "as_loaded", "as_saved", "keep_buffers"]

_HELD = "_hf_dist_held"


class Held:
    """Rows that a buffer holds: never changed, so copies of a state share them."""

    def __init__(self, rows: tuple[Any, ...]) -> None:
        self.rows = rows

    def __deepcopy__(self, memo: object) -> Held:
        return self


def as_saved(state: Any) -> Any:
    """A dataset's state of plain values. Rows that a shuffle buffer holds become a dict."""
    if isinstance(state, Held):
        return {_HELD: [list(row) if isinstance(row, tuple) else row for row in state.rows]}
    if isinstance(state, dict):
        return {key: as_saved(value) for key, value in state.items()}
    return [as_saved(value) for value in state] if isinstance(state, list) else state


def as_loaded(state: Any) -> Any:
    """Undo `as_saved`."""
    if isinstance(state, dict) and set(state) == {_HELD}:
        return Held(tuple(tuple(row) if isinstance(row, list) else row for row in state[_HELD]))
    if isinstance(state, dict):
        return {key: as_loaded(value) for key, value in state.items()}
    return [as_loaded(value) for value in state] if isinstance(state, list) else state


def keep_buffers(dataset: Any) -> int:
    """Give the shuffle buffers of `dataset` a state. Returns the rows of the largest one, 0 where there is none. Local."""
    if type(dataset).__module__.partition(".")[0] != "datasets":
        return 0
    sizes = [0]
    dataset._ex_iterable = _with_kept(dataset._ex_iterable, sizes)
    dataset._prepare_ex_iterable_for_iteration()  # its state begins anew
    return max(sizes)


def _with_kept(node: Any, sizes: list[int]) -> Any:
    """A copy of a tree of `datasets`' iterables in which buffers are kept."""
    kept = _kept_buffer()
    changed = copy.copy(node)
    for name in ("ex_iterable", "ex_iterables"):
        inner = getattr(node, name, None)
        if isinstance(inner, list):
            setattr(changed, name, [_with_kept(each, sizes) for each in inner])
        elif inner is not None:
            setattr(changed, name, _with_kept(inner, sizes))
    if isinstance(changed, kept.__mro__[1]):
        sizes.append(changed.buffer_size)
        return kept(changed.ex_iterable, changed.buffer_size, changed.generator)
    return changed


@functools.cache
def _kept_buffer() -> Any:
    from datasets import iterable_dataset

    class KeptBuffer(iterable_dataset.BufferShuffledExamplesIterable):
        """A shuffle buffer that goes on from a state with the rows that were to come."""

        iter_arrow = None  # rows, not tables: a state is that of a row

        def _again(self, buffer: Any) -> Any:
            return KeptBuffer(buffer.ex_iterable, buffer.buffer_size, buffer.generator)

        def shift_rngs(self, value: int) -> Any:
            return self._again(super().shift_rngs(value))

        def shuffle_data_sources(self, generator: Any) -> Any:
            return self._again(super().shuffle_data_sources(generator))

        def shard_data_sources(self, *args: Any, **kwargs: Any) -> Any:
            return self._again(super().shard_data_sources(*args, **kwargs))

        def _init_state_dict(self) -> Any:
            self.ex_iterable._init_state_dict()
            self._state_dict = dict.fromkeys(("held", "inner", "drawn", "given"))
            self._state_dict["type"] = type(self).__name__
            return self._state_dict

        def load_state_dict(self, state_dict: Any) -> Any:
            return iterable_dataset._BaseExamplesIterable.load_state_dict(self, state_dict)

        def __iter__(self) -> Iterator[Any]:
            rng, rows, given = copy.deepcopy(self.generator), [], 0
            state: Any = self._state_dict if self._state_dict is not None else {}
            if state.get("held") is not None:
                rng.bit_generator.state = state["drawn"]
                rows, given = list(state["held"].rows), state["given"]
                self.ex_iterable.load_state_dict(state["inner"])
            source = iter(self.ex_iterable)
            while True:
                if state:
                    state |= {"held": Held(tuple(rows)), "drawn": rng.bit_generator.state, "given": given}
                    state["inner"] = self.ex_iterable.state_dict()
                for row in source:
                    rows.append(row)
                    if len(rows) >= self.buffer_size:
                        break
                is_full = len(rows) >= self.buffer_size
                order = rng.permutation(len(rows))
                left = self.buffer_size // 2 if is_full else 0
                for index in order[given : len(rows) - left]:
                    if state:
                        state["given"] += 1
                    yield rows[index]
                if not is_full:
                    return
                rows, given = [rows[index] for index in order[len(rows) - left :]], 0

    return KeptBuffer
