"""Stand-ins for the outputs of another stage's module: it runs on meta, once per signature of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hf_dist.errors import ModelError
from hf_dist.parallel.pipeline.meta import MetaTrace, on_meta
from hf_dist.parallel.pipeline.probe import is_leaf
from hf_dist.tensors.deferred_tensor import UnreadTensor, unread

__all__ = ["AbsentOutput", "StandIn"]


class StandIn:
    """Answers calls of a module with zeros in the shapes of its outputs."""

    def __init__(self, twin: nn.Module) -> None:
        """`twin`: a copy of the module on meta."""
        self.twin = twin
        self._seen: dict[object, object] = {}

    def answer(self, args: tuple[object, ...], kwargs: dict[str, object], device: torch.device) -> object:
        """Zeros on `device`, newly allocated in every call because the caller may write into them."""
        leaves, spec = tree_flatten((args, kwargs), is_leaf=is_leaf)
        key = (str(spec), *((x.shape, x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves))
        with _disable_current_modes():
            if key not in self._seen:
                self._seen[key] = self._outputs(leaves, spec)
            return tree_map(
                lambda x: torch.zeros(x.shape, dtype=x.dtype, device=device) if isinstance(x, torch.Tensor) else x,
                self._seen[key],
                is_leaf=is_leaf,
            )

    def _outputs(self, leaves: list[object], spec: Any) -> object:
        meta = [torch.empty_like(x, device="meta") if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = tree_unflatten(meta, spec)
        nothing = frozenset[int]()
        trace = MetaTrace([], read=lambda p: nothing, decide=lambda s: None, drawn=lambda: nothing)
        with torch.no_grad(), on_meta(trace):
            return self.twin(*args, **kwargs)


class AbsentOutput(UnreadTensor):
    """An output of the model that an earlier stage has computed and did not send: reading it raises."""

    _model: str

    @staticmethod
    def of(stand_in: torch.Tensor, model: str) -> AbsentOutput:
        """In place of `stand_in`."""
        made: Any = unread(tuple(stand_in.shape), stand_in.dtype, "", stand_in.detach()).as_subclass(AbsentOutput)
        made._model = model
        return cast(AbsentOutput, made)

    def read_by(self, function: Callable[..., object]) -> torch.Tensor:
        """Raises `ModelError`."""
        raise ModelError(
            f"pipeline.stages: an output of {self._model} was computed by an earlier stage, which does not send it: only what "
            "later blocks read, and what transformers collects, is sent. Do not read it, or lower pipeline.stages."
        )
