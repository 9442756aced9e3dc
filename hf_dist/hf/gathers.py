"""Which ranks accelerate counts as processes and gathers over: those that read different rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils.operations import recursively_apply

from hf_dist.dist import collectives
from hf_dist.dist.axes import Axes
from hf_dist.dist.mesh import MeshAxis
from hf_dist.dist.roles import place
from hf_dist.hf.evaluation import even_rows
from hf_dist.tensors.checksum import as_bytes

__all__ = ["GathersMixin"]


class GathersMixin:
    """Overrides of accelerate's `Accelerator`; part of `DistAccelerator`."""

    axes: Axes
    state: Any
    gradient_state: Any
    shorter_batch: Any
    _rows = "data"
    """The mesh axis that `num_processes` counts: the ranks of the job that read different rows, or temporarily a replica's."""
    _shares = (0, 1)
    """This job's place among those that read different rows, and their number: see `shared_by_replicas`."""

    @property
    def num_processes(self) -> int:
        """Number of processes that read different rows; pipeline ranks share theirs. Loaders and losses count with it."""
        return self._own_readers * self._shares[1]

    @property
    def _own_readers(self) -> int:
        """Processes of this job that read different rows."""
        return self.axes.size(self._rows) if "axes" in vars(self) else int(self.state.num_processes)

    @property
    def process_index(self) -> int:
        """This rank's coordinate within `num_processes`. `is_main_process` still means one process of the job."""
        rank = int(self.state.process_index)
        own = self.axes.coordinate(self._rows, rank) if "axes" in vars(self) else rank
        return own + self._shares[0] * self._own_readers

    @property
    def replica(self) -> tuple[int, int]:
        """(number, of how many): this job among the replicas of `hf_dist.roles`, each of which reads its own rows; (0, 1)
        without replicas. `dataset.shard(of, number)` gives a loop of one's own its rows."""
        where = place()
        return (0, 1) if where is None else (where.role.replica, where.role.replicas)

    @contextmanager
    def shared_by_replicas(self) -> Iterator[None]:
        """Inside, loaders are divided among the processes of all replicas (`replica`), each of which is a job of its own."""
        self._shares = self.replica
        try:
            yield
        finally:
            self._shares = (0, 1)

    @contextmanager
    def in_replica(self) -> Iterator[None]:
        """Inside, processes are counted and gathered within this rank's replica, because replicas train alone."""
        before, self._rows = self._rows, "dp_shard"
        try:
            yield
        finally:
            self._rows = before

    @property
    def _data(self) -> MeshAxis:
        """The axis that gathers run over."""
        own: Any = self
        found: MeshAxis = (own.mesh if self._rows == "data" else own.engine.mesh).data
        return found

    @property
    def _shares_rows(self) -> bool:
        """Whether several ranks read the same rows, so that accelerate's own gathers would count those rows more than once."""
        return self.axes.size("batch") > 1

    @property
    def _own_gathers(self) -> bool:
        """Whether accelerate's own gathers would run over the wrong ranks."""
        return self._shares_rows or self._rows != "data"

    def pad_across_processes(self, tensor: object, *args: object, **kwargs: object) -> Any:
        """Like accelerate's, which needs equally many tensors on all ranks."""
        if self.shorter_batch.is_here(self.gradient_state):
            tensor = even_rows(self._data, tensor)
        return super().pad_across_processes(tensor, *args, **kwargs)  # type: ignore[misc]

    def gather(self, tensor: object) -> Any:
        """Like accelerate's, but over the data ranks only, because pipeline ranks hold equal tensors."""
        if self.shorter_batch.is_here(self.gradient_state):
            tensor = even_rows(self._data, tensor)
        if not self._own_gathers:
            with collectives.waiting():
                return super().gather(tensor)  # type: ignore[misc]
        return recursively_apply(self._gather, tensor, error_on_other_type=True)

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor[None] if tensor.ndim == 0 else tensor
        axis, own = self._data, as_bytes(rows)
        full = torch.empty(axis.size * own.numel(), dtype=torch.uint8, device=own.device)
        full[axis.rank * own.numel() : (axis.rank + 1) * own.numel()] = own
        collectives.all_gather(axis, full).wait()
        return full.view(tensor.dtype).view(axis.size * rows.shape[0], *rows.shape[1:])

    def gather_for_metrics(self, input_data: object, use_gather_object: bool = False) -> Any:
        """Like accelerate's, over the data ranks."""
        if not self._own_gathers or not (use_gather_object or _has_objects(input_data)):
            return super().gather_for_metrics(input_data, use_gather_object)  # type: ignore[misc]
        rows = [row for rows in collectives.all_gather_object(self._data, input_data) for row in rows]
        last = self.gradient_state.end_of_dataloader and self.gradient_state.remainder > 0
        return rows[: self.gradient_state.remainder] if last else rows

    def reduce(self, tensor: object, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Like accelerate's, over the data ranks. As there, `scale` is for XLA and has no effect elsewhere."""
        if not self._own_gathers or reduction == "none":
            return super().reduce(tensor, reduction, scale)  # type: ignore[misc]

        def one(value: torch.Tensor) -> torch.Tensor:
            value = value.clone()
            collectives.all_reduce(self._data, value, op=reduction).wait()
            return value

        return recursively_apply(one, tensor, error_on_other_type=True)


def _has_objects(data: object) -> bool:
    try:
        recursively_apply(lambda x: x, data, error_on_other_type=True)
    except TypeError:
        return True
    return False
