"""Training state in the format of `torch.distributed.checkpoint` (DCP): any layout writes it, any layout reads its part.

DCP plans, `FlatSlice` tells it which boxes of a parameter this rank holds, and `dcp_storage` does the input and output.
Reading needs no process group, and makes nothing but DCP's own descriptions of what a pickle says (`dcp_metadata`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from hf_dist.checkpoint.dcp_metadata import read_metadata
from hf_dist.checkpoint.dcp_storage import Reader, Writer
from hf_dist.checkpoint.file_sums import FileSums
from hf_dist.checkpoint.flat_slice import FlatSlice
from hf_dist.dist.mesh import MeshAxis
from hf_dist.errors import CheckpointError

State = Mapping[str, "FlatSlice | torch.Tensor"]


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> object:
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index) if isinstance(found, FlatSlice) else super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, object], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default drops objects that are neither tensors nor plain values.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index) if isinstance(found, FlatSlice) else super().lookup_tensor(index)


def write_state(folder: Path, state: State, axis: MeshAxis, sums: FileSums | None = None) -> None:
    """Write `state` below `folder`, one file per rank, and add up its bytes. Collective over `axis`; may run in a thread.

    Each element of each tensor must be in the `state` of exactly one rank.
    """
    planner = _SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _quiet():
            dcp.save(
                dict(state),
                storage_writer=Writer(folder, sums or FileSums()),
                planner=planner,
                process_group=axis.group,
                no_dist=axis.group is None,
            )
    except CheckpointException as error:  # DCP's own error, equal on all ranks; its text is a traceback
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(f"training state of rank {rank}: {type(cause).__name__}: {cause}") from error


def read_state(folder: Path, state: State) -> None:
    """Fill the tensors of `state` in place. Local: every rank reads the files that hold its part, one item at a time."""
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _quiet(), torch.no_grad():
            dcp.load(dict(state), storage_reader=Reader(folder), planner=planner, no_dist=True)
    except CheckpointException as error:
        _, (cause, _) = min(error.failures.items())
        raise CheckpointError(f"{folder} cannot be read ({type(cause).__name__}: {cause})") from error


def stored_tensors(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Global shape and dtype of every tensor below `folder`, by name. Raises `CheckpointError` if it cannot be read."""
    return {
        name: (tuple(stored.size), stored.properties.dtype)
        for name, stored in read_metadata(folder).state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message=".*TypedStorage is deprecated.*")
        yield
