"""A tensor in a file that records what is done to it instead of being read.

HF's own conversion code (stack, cat, chunk, transpose, to, ...) runs on these; what comes out knows where each of its elements
is stored (`source_tree.py`). Nothing of HF's tables is repeated here, so a model with a new combination of the same moves
needs no change. An operation that does more than move or cast elements reads its inputs and returns an ordinary tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hf_dist.checkpoint.safetensors_source import FileTensor
from hf_dist.checkpoint.source_tree import Cast, Cut, Join, Leaf, Node, Permute, TreeSource, View
from hf_dist.errors import CheckpointError

aten = torch.ops.aten


class RecordedTensor(torch.Tensor):
    """Shape and dtype of a tensor, and the tree that says where its elements come from."""

    node: Node

    @staticmethod
    def __new__(cls, node: Node) -> RecordedTensor:
        """Looks like a contiguous CPU tensor; has no memory."""
        tensor: RecordedTensor = torch.Tensor._make_wrapper_subclass(
            cls, node.shape, dtype=node.dtype, device=torch.device("cpu")
        )
        tensor.node = node
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Without elements."""
        return f"RecordedTensor({tuple(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        record = _MOVES.get(func)
        recorded = record(func, *args, **kwargs) if record is not None else None
        if recorded is not None:
            return recorded
        if func._schema.is_mutable:
            raise CheckpointError(f"a weight conversion writes into a stored tensor ({func})")
        return func(*_read_all(args), **_read_all(kwargs))


def recorded(tensor: FileTensor) -> RecordedTensor:
    """The whole of a stored tensor."""
    return RecordedTensor(Leaf(tensor))


def read_whole(tensor: RecordedTensor) -> torch.Tensor:
    """An ordinary CPU tensor with the elements."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    TreeSource(tensor.node).read(0, out.numel(), out.view(-1))
    return out


def _read_all(values: Any) -> Any:
    return tree_map(lambda v: read_whole(v) if isinstance(v, RecordedTensor) else v, values)


def _on_meta(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What torch makes of shapes and dtypes, with its errors."""
    leaves, spec = tree_flatten((args, kwargs))
    metas = [torch.empty(v.shape, dtype=v.dtype, device="meta") if isinstance(v, torch.Tensor) else v for v in leaves]
    meta_args, meta_kwargs = tree_unflatten(metas, spec)
    return func(*meta_args, **meta_kwargs)


def _same(func: Any, tensor: RecordedTensor, **kwargs: Any) -> RecordedTensor:
    return RecordedTensor(tensor.node)


def _to_copy(func: Any, tensor: RecordedTensor, **kwargs: Any) -> RecordedTensor | None:
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    if (device is not None and torch.device(device).type != "cpu") or (dtype is not None and dtype.is_complex):
        return None
    return RecordedTensor(tensor.node if dtype in (None, tensor.dtype) else Cast(tensor.node, dtype))


def _view(func: Any, tensor: RecordedTensor, *args: Any, **kwargs: Any) -> RecordedTensor:
    return RecordedTensor(View(tensor.node, tuple(_on_meta(func, tensor, *args, **kwargs).shape)))


def _split(func: Any, tensor: RecordedTensor, sizes: Any, dim: int = 0) -> list[RecordedTensor]:
    dim %= tensor.dim()
    parts, first = [], 0
    for meta in _on_meta(func, tensor, sizes, dim):
        parts.append(RecordedTensor(Cut(tensor.node, dim, first, meta.shape[dim])))
        first += meta.shape[dim]
    return parts


def _unbind(func: Any, tensor: RecordedTensor, dim: int = 0) -> list[RecordedTensor]:
    return [_select(aten.select.int, tensor, dim, i) for i in range(tensor.shape[dim])]


def _select(func: Any, tensor: RecordedTensor, dim: int, index: int) -> RecordedTensor:
    shape = tuple(_on_meta(func, tensor, dim, index).shape)
    dim %= tensor.dim()
    return RecordedTensor(View(Cut(tensor.node, dim, index % tensor.shape[dim], 1), shape))


def _slice(
    func: Any, tensor: RecordedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> RecordedTensor | None:
    if step != 1:
        return None
    dim %= tensor.dim()
    first, last, _ = slice(start, end).indices(tensor.shape[dim])
    return RecordedTensor(Cut(tensor.node, dim, first, max(0, last - first)))


def _permute(func: Any, tensor: RecordedTensor, dims: list[int]) -> RecordedTensor:
    order = tuple(d % tensor.dim() for d in dims)
    _on_meta(func, tensor, dims)
    in_place = order == tuple(range(tensor.dim()))
    return RecordedTensor(tensor.node if in_place else Permute(tensor.node, order))


def _transpose(func: Any, tensor: RecordedTensor, dim0: int = 0, dim1: int = 1) -> RecordedTensor:
    order = list(range(tensor.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(aten.permute.default, tensor, order)


def _cat(func: Any, tensors: list[torch.Tensor], dim: int = 0) -> RecordedTensor | None:
    if not all(isinstance(t, RecordedTensor) and t.dtype == tensors[0].dtype for t in tensors):
        return None
    meta = _on_meta(func, tensors, dim)
    kept = [t.node for t in tensors if isinstance(t, RecordedTensor) and t.numel()]
    if not kept or any(len(node.shape) != meta.dim() for node in kept):
        return None
    return RecordedTensor(Join(kept, dim % meta.dim()) if len(kept) > 1 else kept[0])


def _stack(func: Any, tensors: list[torch.Tensor], dim: int = 0) -> RecordedTensor | None:
    if not all(isinstance(t, RecordedTensor) and t.dtype == tensors[0].dtype and t.numel() for t in tensors):
        return None
    shape = tuple(_on_meta(func, tensors, dim).shape)
    dim %= len(shape)
    one = (*shape[:dim], 1, *shape[dim + 1 :])
    return RecordedTensor(Join([View(t.node, one) for t in tensors if isinstance(t, RecordedTensor)], dim))


_MOVES: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten._to_copy.default: _to_copy,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.unsqueeze.default: _view,
    aten.squeeze.dim: _view,
    aten.squeeze.dims: _view,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
}
