"""Functions of tensors that a GPU runs as one kernel, which reads and writes each element once; Inductor compiles them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hf_dist.log import warn_once

__all__ = ["compiled", "one_kernel"]

_failed: set[Callable[..., Any]] = set()


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for a GPU, of tensors of any size. Compiled at its first call, which takes seconds. Local."""
    return torch.compile(function, dynamic=True)


def one_kernel(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, of which the first is a tensor: compiled on a GPU, else operator by operator. Local.

    Where nothing can be compiled (no Triton, no C compiler) it runs operator by operator as well, which is said once.
    """
    if args[0].device.type == "cpu" or function in _failed:
        return function(*args)
    try:
        return compiled(function)(*args)
    except Exception as error:  # of Dynamo, Inductor, Triton or the C compiler: each has its own
        _failed.add(function)
        first = (str(error).splitlines() or [""])[0]
        warn_once(
            f"torch.compile failed ({type(error).__name__}: {first}), so encoded messages, and casts of weights to eight bits, "
            "take several times longer"
        )
        return function(*args)
