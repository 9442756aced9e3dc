"""A rank's interval of a parameter, as `torch.distributed.checkpoint` (DCP) reads and writes it: under the global shape."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hf_dist.checkpoint.boxes import Box, boxes
from hf_dist.checkpoint.dcp_storage import without_neighbours


class FlatSlice:
    """Elements [start, start + values.numel()) of a tensor of `shape`; implements DCP's protocol for foreign tensors.

    `values`: 1-D tensor; for saving alone, any `Sliceable`. Saving reads it, loading fills it in place, whatever intervals
    the checkpoint was written from.
    """

    def __init__(self, values: Any, start: int, shape: tuple[int, ...]) -> None:
        self.values = values
        self.start = start
        self.shape = torch.Size(shape)
        self._boxes: list[Box] = list(boxes(start, start + values.numel(), tuple(shape)))
        if not shape and values.numel():
            self._boxes = [Box((), (), 0)]

    def size(self) -> torch.Size:
        """Global shape; DCP compares it with the stored one."""
        return self.shape

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(torch.empty(0, dtype=self.values.dtype))
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets), i),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.shape),
            )
            for i, box in enumerate(self._boxes)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        box = next(b for b in self._boxes if index.offset is not None and b.offsets == tuple(index.offset))
        first = box.start - self.start
        return without_neighbours(self.values[first : first + box.numel]).view(box.sizes)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
