"""Named ranges in a profile: what the host and the GPU work for. They cost a question where no profiler runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

__all__ = ["PREFIX", "in_range", "named"]

PREFIX = "hf_dist: "
_NOTHING: AbstractContextManager[Any] = nullcontext()
Function = TypeVar("Function", bound=Callable[..., Any])


def named(words: str) -> AbstractContextManager[Any]:
    """A range with these words in any torch profile that is being taken, a user's own too."""
    if not torch.autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(PREFIX + words)


def in_range(function: Function) -> Function:
    """A collective as a range, named by itself and its axis, the first argument."""

    @functools.wraps(function)
    def run(axis: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.autograd._profiler_enabled():
            return function(axis, *args, **kwargs)
        with named(f"{function.__name__.replace('_', '-')}, {axis.name}"):
            return function(axis, *args, **kwargs)

    return run  # type: ignore[return-value]
