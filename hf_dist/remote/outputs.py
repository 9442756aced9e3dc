"""What a model answers, as a message: the fields in order, each a tensor, tensors in lists, empty, or left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_dist.dist.link import Message

__all__ = ["LEFT_OUT", "flat", "packed", "unpacked"]

LEFT_OUT = "left out"
"""In place of a value that is neither a tensor nor a list of tensors: it is not sent."""


def packed(fields: Mapping[str, Any], **more: object) -> Message:
    """The message of an output's fields; `more`: further entries of the header, plain values."""
    tensors: list[Tensor] = []

    def place(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return len(tensors) - 1
        if isinstance(value, list | tuple) and all(isinstance(v, Tensor | list | tuple | None) for v in value):
            return [place(v) for v in value]
        return None if value is None else LEFT_OUT

    return {**more, "fields": {name: place(value) for name, value in fields.items()}}, tensors


def unpacked(header: Mapping[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
    """The fields of a message made by `packed`; lists become tuples, as in transformers."""

    def value(spec: Any) -> Any:
        if isinstance(spec, list):
            return tuple(map(value, spec))
        return tensors[spec] if isinstance(spec, int) else spec

    return {name: value(spec) for name, spec in header["fields"].items()}


def flat(fields: Mapping[str, Any]) -> list[Tensor]:
    """The tensors of the fields, in the order in which `packed` sends them."""
    return packed(fields)[1]


def mapped(fields: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The same fields, with each tensor changed."""
    header, tensors = packed(fields)
    return unpacked(header, [change(tensor) for tensor in tensors])
