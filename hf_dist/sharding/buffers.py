"""Buffers that training changes (BatchNorm's running statistics): those of the first data rank become everyone's.

As torch's DDP does with `broadcast_buffers`: each rank computes statistics of its own rows, and rank 0's are kept. Here after
each step and before a save, so that evaluation and files see the same on all ranks; in one process nothing is done.
Which buffers: those of torch's norms with running statistics, and what the first training forward changes in place.
A model without any (rotary tables are constants) sends nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from hf_dist import collectives
from hf_dist.mesh import MeshAxis, ParallelMesh


class ChangingBuffers:
    """The buffers of one model that differ between data ranks after a forward, and how they become equal."""

    def __init__(self, model: nn.Module, mesh: ParallelMesh) -> None:
        self._model, self.mesh = weakref.ref(model), mesh
        self._statistics = sorted(
            f"{name}.{buffer}" if name else buffer
            for name, module in model.named_modules()
            if isinstance(module, _NormBase) and module.track_running_stats
            for buffer, _ in module.named_buffers(recurse=False)
        )
        self._observed: set[str] = set()
        self._before: dict[str, tuple[int, int]] | None = None
        self._at_first: dict[str, torch.Tensor] = {}
        self._owners: list[int] | None = None  # which stage runs the module of each of `_statistics`

    @property
    def model(self) -> nn.Module:
        """The model, which whoever calls this holds."""
        model = self._model()
        assert model is not None
        return model

    def watch(self) -> None:
        """A training forward comes: remember what the buffers are. Local; only the first call does something."""
        if self._before is None:
            self._before = self._versions()
            if self.mesh.pp.size > 1:  # kernels write statistics without a word to `_version`
                buffers = dict(self.model.named_buffers())
                self._at_first = {name: buffers[name].clone() for name in self._statistics}

    def changed(self) -> set[str]:
        """Buffers written in place since `watch`. Local."""
        before, now = self._before or {}, self._versions()
        # One that was replaced is a table for the length of this rank's rows (dynamic rotary embeddings).
        return {n for n in before.keys() & now.keys() if before[n][0] == now[n][0] and before[n][1] != now[n][1]}

    def agree(self, everyone: Iterable[set[str]]) -> None:
        """What `changed` returned on all data ranks: the union is exchanged from now on. Local."""
        self._observed |= set().union(*everyone)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Rank 0's values on all data ranks, each stage's on all stages; nothing where none change. Collective over dp, pp."""
        names = sorted({*self._statistics, *self._observed})
        buffers = dict(self.model.named_buffers())
        _broadcast(self.mesh.dp, [buffers[n] for n in names], 0)
        if self.mesh.pp.size > 1 and self._statistics:  # all stages have all modules, and run some
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
        """The values of the first rank of `axis` on all of them. Collective over it; nothing where none change."""
        buffers = dict(self.model.named_buffers())
        _broadcast(axis, [buffers[n] for n in sorted({*self._statistics, *self._observed})], 0)

    def _versions(self) -> dict[str, tuple[int, int]]:
        return {name: (id(buffer), buffer._version) for name, buffer in self.model.named_buffers()}


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
