"""Buffers that training changes (BatchNorm's running statistics): every rank takes those of the first data rank.

Same rule as `broadcast_buffers` of torch's DDP: each rank computes statistics of its own rows, and rank 0's are kept. The
broadcast runs after each step and before a save, so evaluation and files agree on all ranks. One process sends nothing.
It covers torch's norms with running statistics and every buffer that a training forward changes, in place or by another tensor,
whenever it first does. A replaced buffer that no file holds is a table for this rank's rows (dynamic rotary embeddings), which
each rank keeps. A model whose buffers do not change sends one flag per step, beside the norm.

Under a pipeline, each stage has all modules but runs only some: the stage that changes a buffer gives it to the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.modules.batchnorm import _NormBase

from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis, ParallelMesh
from hf_dist.memory.offload.host import brought
from hf_dist.sharding.model_ref import Remains

Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class _Seen:
    """A buffer before training."""

    tensor: weakref.ref[torch.Tensor]
    version: int

    @classmethod
    def of(cls, buffer: torch.Tensor) -> _Seen:
        return cls(weakref.ref(buffer), buffer._version)

    def is_replaced_by(self, buffer: torch.Tensor) -> bool:
        return self.tensor() is not buffer


class ChangingBuffers:
    """Finds the buffers of one model that training changes, and makes them equal on all ranks."""

    def __init__(self, model: Remains, mesh: ParallelMesh) -> None:
        self._of_model, self.mesh = model.buffers, mesh
        self._held = {
            f"{name}.{buffer}" if name else buffer
            for name, module in model.model.named_modules()
            for buffer in module._buffers.keys() - module._non_persistent_buffers_set
        }
        statistics = {
            f"{name}.{buffer}" if name else buffer
            for name, module in model.model.named_modules()
            if isinstance(module, _NormBase) and module.track_running_stats
            for buffer, _ in module.named_buffers(recurse=False)
        }
        self._known: dict[str, tuple[int, Shape]] = {}  # name -> (stage that changes it, shape and dtype)
        self._silent: dict[str, torch.Tensor] = {}  # kernels write statistics without increasing `_version`
        self._seen: dict[
            str, _Seen
        ] = {}  # before the first training forward: a flag that is read late still finds the change
        self._is_first = True
        self._late: Callable[[], object] | None = None  # waits for the flag of the last step and returns it
        self._now: dict[str, torch.Tensor] = {}  # those of the step under way
        buffers = self._of_model()
        if mesh.pp.size > 1:
            self._silent = {name: buffers[name].clone() for name in statistics}
        else:
            self._known = {name: (0, _shape_of(buffers[name])) for name in statistics}

    @property
    def _is_alone(self) -> bool:
        return self.mesh.dp.size == self.mesh.pp.size == 1

    def watch(self) -> None:
        """Record the buffers before a training forward. Local; calls after the first do nothing."""
        if not self._seen:
            self._seen = {name: _Seen.of(buffer) for name, buffer in self._of_model().items()}

    def _changed(self, buffers: dict[str, torch.Tensor]) -> dict[str, Shape]:
        """Buffers whose changes the other ranks do not know of, or that have another shape than they know. Local."""
        found: dict[str, Shape] = {}
        for name, buffer in buffers.items():
            shape, seen = _shape_of(buffer), self._seen.get(name)
            if name in self._known:
                is_new = self._known[name][1] != shape
            elif name in self._silent:
                is_new = not torch.equal(self._silent[name], buffer)
            elif seen is None or seen.is_replaced_by(buffer):
                is_new = bool(self._seen) and name in self._held
            else:
                is_new = seen.version != buffer._version
            if is_new:
                found[name] = shape
        return found

    def flag(self) -> bool:
        """Whether this rank has a change to tell of: part of the vector that all ranks add up before a step. Local."""
        if self._is_alone:
            return False
        self._now = self._of_model()
        return bool(self._changed(self._now))

    def told(self, flags: torch.Tensor) -> None:
        """`flags`: the sum of all ranks' `flag`, 0D. Collective over dp and pp at the first step, and if it is not 0.

        On a GPU the host reads it one step later, when it has long arrived.
        """
        if self._is_alone:
            return
        late, self._late = self._late, brought(flags) if flags.is_cuda else None
        is_told = self._is_first or bool(late() if late is not None else not flags.is_cuda and flags)
        self._is_first = False
        if not is_told:
            return
        mine = self._changed(self._now)
        of_data = collectives.all_gather_object(self.mesh.dp, mine)
        self._learn(collectives.all_gather_object(self.mesh.pp, of_data) if self.mesh.pp.size > 1 else [of_data])

    def _learn(self, stages: list[list[dict[str, Shape]]]) -> None:
        """Exchange from now on what data ranks of `stages` have changed. Local."""
        for name in sorted({name for ranks in stages for changed in ranks for name in changed}):
            stage, ranks = next((s, r) for s, r in enumerate(stages) if any(name in changed for changed in r))
            shapes = {changed[name] for changed in ranks if name in changed}
            if len(shapes) == 1:
                self._known[name] = (self._known.get(name, (stage,))[0], shapes.pop())
            else:  # a table for each rank's rows
                self._known.pop(name, None)
                self._held.discard(name)
            self._silent.pop(name, None)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Broadcast rank 0's values to all data ranks, and each stage's values to all stages. Collective over dp and pp."""
        if self._is_alone:
            return
        buffers, self._now = self._now or self._of_model(), {}
        names = sorted(self._known)
        self._broadcast(self.mesh.dp, buffers, names, 0)
        for stage in range(self.mesh.pp.size) if self.mesh.pp.size > 1 else ():
            self._broadcast(self.mesh.pp, buffers, [n for n in names if self._known[n][0] == stage], stage)

    @torch.no_grad()
    def share(self, axis: MeshAxis) -> None:
        """Broadcast the values of the first rank of `axis` to the others. Collective over `axis`."""
        buffers = self._of_model()
        if self._is_alone:  # a replica of one rank, which tells nobody in its steps
            self._learn([[self._changed(buffers)]])
        self._broadcast(axis, buffers, sorted(self._known), 0)

    def _broadcast(self, axis: MeshAxis, buffers: dict[str, torch.Tensor], names: list[str], source: int) -> None:
        """One broadcast for each dtype."""
        if axis.size == 1:
            return
        device = self.mesh.device
        for dtype in sorted({self._known[n][1][1] for n in names}, key=str):
            some = [(n, torch.Size(self._known[n][1][0])) for n in names if self._known[n][1][1] is dtype]
            # A buffer that was dropped, or has got another shape since all ranks agreed, keeps its place in the message.
            own = [_fitting(buffers.get(n), shape, dtype) for n, shape in some]
            parts = [
                torch.zeros(s.numel(), dtype=dtype, device=device) if b is None else b.reshape(-1)
                for b, (_, s) in zip(own, some, strict=True)
            ]
            flat = torch.cat(parts)
            collectives.broadcast(axis, flat, source)
            if axis.rank != source:
                for buffer, values in zip(own, flat.split([s.numel() for _, s in some]), strict=True):
                    if buffer is not None:
                        buffer.copy_(values.view(buffer.shape))


def _shape_of(buffer: torch.Tensor) -> Shape:
    return tuple(buffer.shape), buffer.dtype


def _fitting(buffer: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor | None:
    return buffer if buffer is not None and buffer.shape == shape and buffer.dtype is dtype else None
