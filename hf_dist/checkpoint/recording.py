"""A tensor in a file that records the operations on it instead of being read.

HF's own conversion code (stack, cat, chunk, transpose, to, ...) runs on these tensors, in any thread. The result knows where
each of its elements is stored (`provenance.py`). No HF table is repeated here, so a model with a new combination of the same
moves needs no change. An operation that does more than move or cast elements reads its inputs and returns an ordinary tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hf_dist.checkpoint.piece_source import PieceSource
from hf_dist.checkpoint.provenance import Trail
from hf_dist.checkpoint.safetensors_source import FileTensor
from hf_dist.errors import CheckpointError

aten = torch.ops.aten


class _Files:
    """The stored tensors of one load, and the trail from them to all derived tensors."""

    def __init__(self) -> None:
        self.trail = Trail(casts=True)
        self.tensors: dict[str, FileTensor] = {}


class RecordedTensor(torch.Tensor):
    """Shape, strides and dtype of a CPU tensor, with a meta twin that tracks where its elements come from."""

    meta: torch.Tensor
    files: _Files

    @staticmethod
    def __new__(cls, meta: torch.Tensor, files: _Files) -> RecordedTensor:
        """Create it without memory."""
        tensor: RecordedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=torch.device("cpu"),
        )
        tensor.meta, tensor.files = meta, files
        return tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Shows no elements."""
        return f"RecordedTensor({tuple(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            raise CheckpointError(f"a weight conversion writes into a stored tensor ({func})")
        recorded = _follow(func, args, kwargs)
        return recorded if recorded is not None else func(*_read_all(args), **_read_all(kwargs))

    @property
    def source(self) -> PieceSource:
        """The source of its elements. Raises `UntraceableError` if they lie in too many places."""
        pieces = self.files.trail.pieces(self.meta)
        parts = [(self.files.tensors[piece.param], piece.flipped()) for piece in pieces]
        return PieceSource(self.shape, self.dtype, parts)


def recorded(tensors: Iterable[FileTensor]) -> dict[str, RecordedTensor]:
    """Whole stored tensors, by name."""
    files = _Files()
    found = {}
    for tensor in tensors:
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        files.trail.add_root(tensor.name, meta)
        files.tensors[tensor.name] = tensor
        found[tensor.name] = RecordedTensor(meta, files)
    return found


def stored(tensor: torch.Tensor) -> FileTensor | None:
    """The stored tensor that `tensor` equals, complete and in the same order; None for anything else."""
    if not isinstance(tensor, RecordedTensor):
        return None
    pieces = tensor.files.trail.pieces(tensor.meta)
    found = tensor.files.tensors[pieces[0].param] if len(pieces) == 1 else None
    if found is None or tuple(tensor.shape) != found.shape:
        return None
    piece = pieces[0].merged()
    whole = piece.numel == found.numel == piece.run_numel and piece.offset == piece.target_offset == 0
    return found if whole else None


def made_of(tensor: torch.Tensor, leaf: FileTensor) -> RecordedTensor:
    """A recorded tensor, in the load of `tensor`, for `leaf`, which is computed from stored tensors when it is read."""
    assert isinstance(tensor, RecordedTensor)
    meta = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    tensor.files.trail.add_root(leaf.name, meta)
    tensor.files.tensors[leaf.name] = leaf
    return RecordedTensor(meta, tensor.files)


def read_whole(tensor: RecordedTensor) -> torch.Tensor:
    """Read the elements into an ordinary CPU tensor."""
    out = torch.empty(tensor.shape, dtype=tensor.dtype)
    tensor.source.read(0, out.numel(), out.view(-1))
    return out


def _follow(func: Any, args: object, kwargs: dict[str, Any]) -> object:
    """The recorded result if `func` only moves or casts elements of recorded tensors; otherwise None."""
    given: list[Any] = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not all(isinstance(tensor, RecordedTensor) for tensor in given):
        return None
    files, kwargs = given[0].files, dict(kwargs)
    if func is aten._to_copy.default:
        device, dtype = kwargs.pop("device", None), kwargs.get("dtype")
        if (device is not None and torch.device(device).type != "cpu") or (dtype is not None and dtype.is_complex):
            return None
    metas = tree_map(lambda v: v.meta if isinstance(v, RecordedTensor) else v, args)
    try:
        result = func(*metas, **kwargs)
    except RuntimeError:  # it needs values, or would fail with them, too
        return None
    files.trail.note(func, result, metas)
    outs = tree_leaves(result)
    if not all(isinstance(out, torch.Tensor) and files.trail.knows(out) for out in outs):
        return None
    return tree_map(lambda out: RecordedTensor(out, files), result)


def _read_all(values: object) -> Any:
    return tree_map(lambda v: read_whole(v) if isinstance(v, RecordedTensor) else v, values)
