"""Maps elements of parameters to bytes of safetensors files. Pure arithmetic, and JSON.

The plan is stored with the checkpoint, so `hf-dist export` needs no model code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from hf_dist.checkpoint.pieces import Piece
from hf_dist.errors import CheckpointError, ConfigError

__all__ = ["SAFETENSORS_DTYPES", "TORCH_DTYPES", "Extent", "StoredTensor", "WeightFile", "WeightPlan"]

WEIGHTS = "model.safetensors"
VERSION = 1

# In the reverse order of safetensors' `Dtype` enum, by which it sorts tensors within a file.
SAFETENSORS_DTYPES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_RANKS = {dtype: number for number, dtype in enumerate(SAFETENSORS_DTYPES)}
TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file, and the source of its elements."""

    name: str
    """Name on disk."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    """Together they cover the tensor exactly once."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Extent:
    """The place of a stored tensor: contiguous bytes of one file."""

    tensor: StoredTensor
    file: str
    offset: int
    """First byte in the file, header included."""


@dataclass(frozen=True)
class WeightFile:
    """One safetensors file, laid out as safetensors itself would write it."""

    name: str
    """Relative to the folder."""
    tensors: tuple[StoredTensor, ...]
    """In the order of their bytes."""

    @classmethod
    def of(cls, name: str, tensors: Iterable[StoredTensor]) -> WeightFile:
        """Sort as safetensors does: widest dtype first, then by name."""
        return cls(name, tuple(sorted(tensors, key=lambda t: (-_RANKS[t.dtype], t.name))))

    @cached_property
    def header(self) -> bytes:
        """Length, JSON and padding: everything before the data."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor in self.tensors:
            begin, end = end, end + tensor.nbytes
            dtype = SAFETENSORS_DTYPES[tensor.dtype]
            entries[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def data_nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + self.data_nbytes

    @cached_property
    def extents(self) -> tuple[Extent, ...]:
        """The tensors with their byte positions, in order."""
        found, position = [], len(self.header)
        for tensor in self.tensors:
            found.append(Extent(tensor, self.name, position))
            position += tensor.nbytes
        return tuple(found)


@dataclass(frozen=True)
class WeightPlan:
    """All weight files of a folder."""

    files: tuple[WeightFile, ...]
    indexes: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Contents of the index files (`model.safetensors.index.json`), by path in the folder."""

    @classmethod
    def pack(
        cls,
        tensors: Iterable[StoredTensor],
        *,
        weights_name: str = WEIGHTS,
        max_shard_size: int | str = "50GB",
        metadata: Mapping[str, object] | None = None,
        storages: Mapping[str, tuple[object, int]] | None = None,
    ) -> WeightPlan:
        """Split into files of at most `max_shard_size` as `save_pretrained` does: in the given order, by HF's own function.

        `storages`: name -> (identity, bytes) of the storage that HF would see behind the tensor. HF keeps the views of one
        storage (the experts of a layer) in one file. `metadata` is added to the index next to `total_size`.
        """
        by_name = {tensor.name: tensor for tensor in tensors}
        unknown = sorted({str(t.dtype) for t in by_name.values() if t.dtype not in SAFETENSORS_DTYPES})
        if unknown:
            raise CheckpointError(f"safetensors has no name for the dtype {unknown[0]}; convert these weights first")
        storage_of = storages or {}
        try:
            split = split_state_dict_into_shards_factory(
                by_name,
                get_storage_size=lambda t: storage_of.get(t.name, (None, t.nbytes))[1],
                get_storage_id=lambda t: storage_of.get(t.name, (None, 0))[0],
                filename_pattern=weights_name.replace(".safetensors", "{suffix}.safetensors"),
                max_shard_size=max_shard_size,
            )
        except ValueError as error:
            raise ConfigError(f"max_shard_size: {error}") from error
        files = [WeightFile.of(f, (by_name[n] for n in names)) for f, names in split.filename_to_tensors.items()]
        indexes = {}
        if split.is_sharded:
            content = {"metadata": {**(metadata or {}), **split.metadata}, "weight_map": split.tensor_to_filename}
            indexes[f"{weights_name}.index.json"] = content
        return cls(tuple(files), indexes)

    @classmethod
    def join(cls, plans: Iterable[tuple[str, WeightPlan]]) -> WeightPlan:
        """Combine several plans in one folder, each below a path ("" for the folder itself)."""
        files: list[WeightFile] = []
        indexes: dict[str, Mapping[str, object]] = {}
        for below, plan in plans:
            files += [WeightFile(below + file.name, file.tensors) for file in plan.files]
            indexes.update({below + name: content for name, content in plan.indexes.items()})
        return cls(tuple(files), indexes)

    @property
    def nbytes(self) -> int:
        """Bytes of all weight files."""
        return sum(file.nbytes for file in self.files)

    @cached_property
    def by_param(self) -> Mapping[str, tuple[tuple[Extent, Piece], ...]]:
        """Parameter -> the places of its elements, in file order."""
        found: dict[str, list[tuple[Extent, Piece]]] = {}
        for file in self.files:
            for extent in file.extents:
                for piece in extent.tensor.pieces:
                    found.setdefault(piece.param, []).append((extent, piece))
        return {name: tuple(extents) for name, extents in found.items()}

    def to_json(self) -> dict[str, object]:
        """Plain values that `from_json` accepts."""
        return {
            "version": VERSION,
            "indexes": {name: dict(content) for name, content in self.indexes.items()},
            "files": {
                file.name: {t.name: [SAFETENSORS_DTYPES[t.dtype], list(t.shape), _pieces(t)] for t in file.tensors}
                for file in self.files
            },
        }

    @classmethod
    def from_json(cls, plan: Mapping[str, Any]) -> WeightPlan:
        """The inverse of `to_json`. Raises `CheckpointError` for a newer version."""
        if plan.get("version", 0) > VERSION:
            raise CheckpointError(
                f"the plan of the weights has version {plan['version']}, this hf_dist reads {VERSION}. Upgrade hf_dist."
            )
        files = tuple(
            WeightFile(file, tuple(_stored_tensor(name, *entry) for name, entry in tensors.items()))
            for file, tensors in plan["files"].items()
        )
        return cls(files, dict(plan["indexes"]))


def _pieces(tensor: StoredTensor) -> list[object]:
    if tensor.pieces == (Piece.whole(tensor.pieces[0].param, tensor.numel),):
        return [tensor.pieces[0].param]
    return [[p.param, p.sizes, p.offset, p.strides, p.target_offset, p.target_strides] for p in tensor.pieces]


def _stored_tensor(name: str, dtype: str, shape: list[int], pieces: list[Any]) -> StoredTensor:
    boxes = [
        Piece.whole(p, math.prod(shape))
        if isinstance(p, str)
        else Piece(p[0], tuple(p[1]), p[2], tuple(p[3]), p[4], tuple(p[5]))
        for p in pieces
    ]
    return StoredTensor(name, tuple(shape), TORCH_DTYPES[dtype], tuple(boxes))
