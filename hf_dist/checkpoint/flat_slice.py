"""A rank's interval of a parameter in the form that `torch.distributed.checkpoint` (DCP) reads and writes."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hf_dist.checkpoint.dcp_storage import without_neighbours
from hf_dist.tensors.tensor_slice import Box, TensorSlice


class FlatSlice:
    """Elements [start, start + values.numel()) of the slice that a rank holds; implements DCP's protocol for foreign tensors.

    `values`: 1-D tensor, or any `Sliceable` if it is only saved. Saving reads it. Loading fills it in place, whatever
    intervals the checkpoint was written from. `held`: the rank's slice of the tensor; a plain shape means all of it.
    """

    def __init__(self, values: Any, start: int, held: TensorSlice | tuple[int, ...]) -> None:
        self.values = values
        self.start = start
        self.held = TensorSlice.of(held)
        self._boxes = list(self.held.boxes(start, start + values.numel()))

    def size(self) -> torch.Size:
        """Shape of the whole tensor; DCP compares it with the stored one."""
        return torch.Size(self.held.whole)

    def fill(self, whole: torch.Tensor) -> None:
        """Copy this interval from the whole tensor."""
        for box in self._boxes:
            self._part(box).copy_(whole[box.index])

    def _part(self, box: Box) -> torch.Tensor:
        first = box.start - self.start
        part: torch.Tensor = self.values[first : first + box.span]
        if box.span == box.numel:
            return without_neighbours(part).view(box.sizes)
        return part.as_strided(box.sizes, box.strides)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(torch.empty(0, dtype=self.values.dtype))
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets), i),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.size()),
            )
            for i, box in enumerate(self._boxes)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._part(next(b for b in self._boxes if index.offset is not None and b.offsets == tuple(index.offset)))


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
