"""Buffers that training changes (BatchNorm's running statistics): every rank takes those of the first data rank.

Same rule as `broadcast_buffers` of torch's DDP: each rank computes statistics of its own rows, and rank 0's are kept. The
broadcast runs after each step and before a save, so evaluation and files agree on all ranks. One process sends nothing.
It covers torch's norms with running statistics and any buffer that the first training forward changes in place.
A model without such buffers (rotary tables are constants) sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.modules.batchnorm import _NormBase

from hf_dist import collectives
from hf_dist.mesh import MeshAxis, ParallelMesh
from hf_dist.sharding.remains import Remains


class ChangingBuffers:
    """Finds the buffers of one model that differ between data ranks after a forward, and makes them equal."""

    def __init__(self, model: Remains, mesh: ParallelMesh) -> None:
        self._of_model, self.mesh = model.buffers, mesh
        self._statistics = sorted(
            f"{name}.{buffer}" if name else buffer
            for name, module in model.model.named_modules()
            if isinstance(module, _NormBase) and module.track_running_stats
            for buffer, _ in module.named_buffers(recurse=False)
        )
        self._observed: set[str] = set()
        self._before: dict[str, tuple[int, int]] | None = None
        self._at_first: dict[str, torch.Tensor] = {}
        self._owners: list[int] | None = None  # which stage runs the module of each of `_statistics`

    def watch(self) -> None:
        """Record the buffers before a training forward. Local; calls after the first do nothing."""
        if self._before is None:
            self._before = self._versions()
            if self.mesh.pp.size > 1:  # kernels write statistics without increasing `_version`
                buffers = self._of_model()
                self._at_first = {name: buffers[name].clone() for name in self._statistics}

    def changed(self) -> set[str]:
        """Buffers written in place since `watch`. Local."""
        before, now = self._before or {}, self._versions()
        # A replaced buffer is a table for the length of this rank's rows (dynamic rotary embeddings): do not exchange it.
        return {n for n in before.keys() & now.keys() if before[n][0] == now[n][0] and before[n][1] != now[n][1]}

    def agree(self, everyone: Iterable[set[str]]) -> None:
        """`everyone`: results of `changed` from all data ranks. Their union is exchanged from now on. Local."""
        self._observed |= set().union(*everyone)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Broadcast rank 0's values to all data ranks, and each stage's values to all stages. Collective over dp and pp."""
        buffers = self._of_model()
        names = sorted({*self._statistics, *self._observed} & buffers.keys())
        _broadcast(self.mesh.dp, [buffers[n] for n in names], 0)
        if self.mesh.pp.size > 1 and self._statistics:  # every stage has all modules but runs only some
            if self._owners is None and self._before is None:
                return  # nothing has been trained
            if self._owners is None:
                mine = {n for n, before in self._at_first.items() if not torch.equal(before, buffers[n])}
                self._at_first.clear()
                ran = collectives.all_gather_object(self.mesh.pp, mine)
                self._owners = [next((s for s, c in enumerate(ran) if n in c), 0) for n in self._statistics]
            for stage in range(self.mesh.pp.size):
                own = [buffers[n] for n, owner in zip(self._statistics, self._owners, strict=True) if owner == stage]
                _broadcast(self.mesh.pp, own, stage)

    @torch.no_grad()
    def share(self, axis: MeshAxis) -> None:
        """Broadcast the values of the first rank of `axis` to the others. Collective over `axis`."""
        buffers = self._of_model()
        _broadcast(axis, [buffers[n] for n in sorted({*self._statistics, *self._observed})], 0)

    def _versions(self) -> dict[str, tuple[int, int]]:
        return {name: (id(buffer), buffer._version) for name, buffer in self._of_model().items()}


def _broadcast(axis: MeshAxis, buffers: list[torch.Tensor], source: int) -> None:
    """One broadcast for each dtype."""
    if axis.size == 1:
        return
    for dtype in sorted({b.dtype for b in buffers}, key=str):
        some = [b for b in buffers if b.dtype == dtype]
        flat = torch.cat([b.reshape(-1) for b in some])
        collectives.broadcast(axis, flat, source)
        if axis.rank != source:
            for buffer, values in zip(some, flat.split([b.numel() for b in some]), strict=True):
                buffer.copy_(values.view(buffer.shape))
