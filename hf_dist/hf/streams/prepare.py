"""A DataLoader of the user becomes a `StreamLoader`: how many lanes there are, and who reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hf_dist.dist import collectives
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.hf.streams.loader import StreamLoader
from hf_dist.hf.streams.own_division import refuse_wrong_division
from hf_dist.hf.streams.plan import first_lanes, plan_of
from hf_dist.hf.streams.windows import Shape

__all__ = ["MeshDataRanks", "stream_loader"]

_OPTIONS = (
    "collate_fn num_workers pin_memory timeout worker_init_fn multiprocessing_context generator prefetch_factor "
    "persistent_workers batch_size drop_last"
)


class MeshDataRanks:
    """The data ranks of a mesh. Ranks that share rows (`pp`, `tp`, `cp`) call in the same places and get the same answers."""

    def __init__(self, mesh: ParallelMesh, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._mesh = mesh

    def any(self, value: bool) -> bool:
        """Whether it is true on a rank. Collective over all ranks, on the host: a GPU is not waited for."""
        flag = torch.tensor([int(value)])
        collectives.all_reduce(self._mesh.control, flag, op="max").wait()
        return bool(flag)

    def exchange(self, value: Any) -> list[Any]:
        """The value of each data rank. Collective over them."""
        same = self._mesh.data.size == self._mesh.world.size
        return collectives.all_gather_object(self._mesh.control if same else self._mesh.data, value)

    def __reduce__(self) -> Any:
        return (_Alone, ())


class _Alone:
    """What is left of the ranks in another process."""

    rank, size = 0, 1

    def any(self, value: bool) -> bool:
        return value

    def exchange(self, value: Any) -> list[Any]:
        return [value]


def stream_loader(accelerator: Any, loader: Any, on_device: bool) -> StreamLoader | None:
    """`loader` of an iterable dataset, prepared to stream; None for another one. Local, but all ranks call it."""
    wanted = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset) and loader.batch_size
    if not wanted or accelerator.dist_config.local_sgd.every or getattr(loader, "_is_accelerate_prepared", False):
        return None
    dataset, size = loader.dataset, loader.batch_size
    size //= accelerator.num_processes if accelerator.split_batches else 1
    options: Mapping[str, Any] = {name: getattr(loader, name) for name in _OPTIONS.split()} | {"batch_size": size}
    ranks = MeshDataRanks(accelerator.mesh, accelerator.process_index, accelerator.num_processes)
    by_first = accelerator.dispatch_batches
    refuse_wrong_division(dataset, ranks.size, accelerator.mesh.world.size, size, by_first=by_first)
    trains = accelerator.stream_microbatches
    shape = Shape(trains or 1, size, fills=bool(trains) and not _has_length(dataset), drops=loader.drop_last)
    lanes = first_lanes(dataset, ranks.size, loader.num_workers, accelerator.dist_config.hf_dist.data_lanes)
    plan = plan_of(lanes, dataset, shape, ranks, by_first=by_first)
    device = accelerator.device if on_device else None
    locked = loader.pin_memory and getattr(device, "type", "") == "cuda"
    stream = StreamLoader(plan, dataset, device, accelerator.non_blocking or locked, options)
    stream.use_stateful_dataloader = not trains
    return stream


def _has_length(dataset: object) -> bool:
    try:
        return len(dataset) is not None  # type: ignore[arg-type]
    except (TypeError, AttributeError, NotImplementedError):
        return False
