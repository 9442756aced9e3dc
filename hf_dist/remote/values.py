"""Arguments and results of calls as JSON and tensors: nothing is pickled, so nothing runs while it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from hf_dist.errors import ModelError

__all__ = ["Referring", "decoded", "encoded"]

_PLAIN = (bool, int, float, str, type(None))


@runtime_checkable
class Referring(Protocol):
    """Something that stands for an object in a role."""

    @property
    def number(self) -> int:
        """Of the call that made the object."""


def encoded(value: Any, tensors: list[Tensor], what: str) -> Any:
    """`value` as JSON, its tensors appended to `tensors`. `what`: its name in errors.

    Raises `ModelError` for anything but tensors, plain values, references, and lists, tuples and dicts of those.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, _PLAIN):
        return {"plain": value}
    if isinstance(value, Referring):
        return {"reference": value.number}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [encoded(v, tensors, what) for v in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encoded(v, tensors, what) for key, v in value.items()}}
    raise ModelError(
        f"{what} has a {type(value).__name__}, and only tensors, numbers, strings, lists, dicts and references are sent: keep "
        "it in the role, and call a function on its reference"
    )


def decoded(spec: Any, tensors: Sequence[Tensor], referred: Callable[[int], Any]) -> Any:
    """The value of `encoded`; `referred(number)`: the object of a reference."""
    ((kind, content),) = spec.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "plain":
        return content
    if kind == "reference":
        return referred(content)
    if kind == "dict":
        return {key: decoded(value, tensors, referred) for key, value in content.items()}
    values = [decoded(value, tensors, referred) for value in content]
    return tuple(values) if kind == "tuple" else values
