"""Half precision computed in fp32, so that a comparison sees the model and not its rounding.

A model in bf16 is computed again with all products and sums in fp32: its weights stay bf16 tensors and are widened where an
operation reads them. What the engine does to stored weights meanwhile (gathers, casts) is `as_stored`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dist.tensors import pytree

__all__ = ["FullPrecision", "as_stored"]

_HALF = (torch.bfloat16, torch.float16)
_PRODUCTS: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
"""Of fp32. HF turns TF32 on, which keeps 10 bits of a fraction."""
_active: list[FullPrecision] = []
_PLAIN = nullcontext()


class FullPrecision(TorchDispatchMode):
    """Inside, operations of this thread read half-precision tensors as fp32, and asked for a half dtype they give fp32.

    Views stay views, tensors that are written keep their dtype, and collectives send what they are given. No gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self._paused = False
        self._before: list[str] = []

    def __enter__(self) -> FullPrecision:
        _active.append(self)
        self._before = [products.fp32_precision for products in _PRODUCTS]
        for products in _PRODUCTS:
            products.fp32_precision = "ieee"
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for products, before in zip(_PRODUCTS, self._before, strict=True):
            products.fp32_precision = before
        _active.remove(self)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        """Run one operation."""
        kwargs = kwargs or {}
        if self._paused or "c10d" in func.namespace:
            return func(*args, **kwargs)
        written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if not written and any(r.alias_info is not None for r in func._schema.returns):
            return func(*args, **kwargs)  # a view
        names = [a.name for a in func._schema.arguments]
        args = tuple(x if name in written else _widened(x) for name, x in zip(names, args, strict=False))
        kwargs = {name: x if name in written else _widened(x) for name, x in kwargs.items()}
        return func(*args, **kwargs)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, operations run as they are written."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


def as_stored() -> AbstractContextManager[None]:
    """What runs inside is not computed but stored: the dtypes are those that were asked for, also in `FullPrecision`."""
    return _active[-1].paused() if _active else _PLAIN


def _widened(value: object) -> object:
    """An argument: a tensor, a dtype, or a list of them."""
    if isinstance(value, torch.dtype):
        return torch.float32 if value in _HALF else value
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _HALF else value
    return pytree.mapped(_widened, value) if isinstance(value, list | tuple) else value
