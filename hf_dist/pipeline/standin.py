"""Stand-ins for the outputs of another stage's module: it runs on meta, once per signature of its arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hf_dist.pipeline.meta import MetaTrace, on_meta
from hf_dist.pipeline.probe import is_leaf

__all__ = ["StandIn"]


class StandIn:
    """Answers calls of a module with zeros in the shapes of its outputs."""

    def __init__(self, twin: nn.Module) -> None:
        """`twin`: a copy of the module on meta."""
        self.twin = twin
        self._seen: dict[Any, Any] = {}

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
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

    def _outputs(self, leaves: list[Any], spec: Any) -> Any:
        meta = [torch.empty_like(x, device="meta") if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = tree_unflatten(meta, spec)
        nothing = frozenset[int]()
        trace = MetaTrace([], read=lambda p: nothing, decide=lambda s: None, drawn=lambda: nothing)
        with torch.no_grad(), on_meta(trace):
            return self.twin(*args, **kwargs)
