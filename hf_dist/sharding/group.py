"""One flat buffer for those parameters of a unit that share device, dtype and `requires_grad`.

Flat is storage, never identity: the `nn.Parameter` objects are kept and become views into `full` once.
`full` is allocated and freed by resizing its storage. Never re-point a view at another storage: autograd keeps aliases such
as `weight.t()`, and gradients would be silently wrong.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_dist.dist import collectives
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.errors import FreedParameterError, ModelError
from hf_dist.memory.offload.resting import Tier, opened
from hf_dist.memory.offload.storage import Storage
from hf_dist.sharding.at_rest import plan_at_rest
from hf_dist.sharding.group_axes import GroupAxes
from hf_dist.sharding.guard import guard, release, set_owner, unguard
from hf_dist.sharding.hpz import second_copy
from hf_dist.sharding.layout import FlatLayout, ParamSlot
from hf_dist.sharding.lazy import WeightSource, copy_overlap, lazy_source, read_overlap
from hf_dist.sharding.param_slice import held_slice
from hf_dist.sharding.placement import Placement, StatePlacements
from hf_dist.sharding.precision import Precision
from hf_dist.sharding.prepared import GradientAccess, prepare
from hf_dist.sharding.single_rank_gather import gathers_alone, leave_elements
from hf_dist.sharding.states import states_of
from hf_dist.sharding.user_writes import UserWrites
from hf_dist.sharding.window_gradient import WindowGradient
from hf_dist.tensors.hugepages import in_huge_pages
from hf_dist.tensors.tensor_slice import TensorSlice


class FlatGroup:
    """Weights, master weights and gradients of some parameters, each state in one 1-D tensor."""

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        placements: StatePlacements,
        mesh: ParallelMesh,
        precision: Precision,
        storage: Storage,
        axes: GroupAxes,
    ) -> None:
        """Collective over `axes.shard` if a parameter is lazy and its weights rest replicated; else local."""
        self.params = [p for _, p in params]
        self.mesh = mesh
        self.placements = placements
        self.precision = precision
        self.axes = axes
        self.storage = storage
        self.trainable = self.params[0].requires_grad
        self.dtype = precision.compute_dtype(params[0][0], self.params[0].dtype)
        self.is_written = self.dtype.is_floating_point
        """Whether user code may write the weights: packed ones are read only."""
        self.loaded_dtypes = [p.dtype for p in self.params]
        self.layout = FlatLayout.pack([(n, held_slice(p)) for n, p in params], axes.shard.size)
        wire = precision.wire(axes.shard.size)
        self.window = WindowGradient(
            self.params, self.layout, mesh.device, accumulated=precision.grads, wire=wire, divisor=axes.divisor
        )
        self.fresh = True  # `full` holds (or is being filled with) the current weights
        self.pins = 0  # `gathered()` blocks that want the full weights to stay
        self._guarded = False
        self._kept = False  # user code has read the weights outside of a pass, which this rank can gather alone
        self._gather: collectives.Handle | None = None
        self._stale_shard = False  # `master` was written and `shard` was not
        self.share: Any = None
        """State that all groups of a model cut along `tp` share (`slices.py`); None for an uncut model."""
        self.slices: list[list[TensorSlice]] | None = None
        """Slices that each rank along `tp` keeps of every parameter; None until the first request."""
        self.reach: Callable[[], bool | None] = lambda: False
        """Of the root's groups: gathers the weights for the current forward, returns whether one runs (`hooks.py`)."""
        self.access: GradientAccess | None = None
        """Implements `p.grad` of the parameters; None for frozen groups."""
        self.num_changes = 0  # how often `master` was written
        self._is_outdated = False  # `full` of a frozen group, whose `master` was written
        self._keepable = False  # `full` was gathered since the weights changed, so a second copy can be made of it
        self._build_storage()
        for slot, p in zip(self.layout.slots, self.params, strict=True):
            set_owner(p, weakref.ref(self), slot.name)
            if self.is_written:
                unguard(p)  # the guard class must derive from the prepared class
                prepare(p)
                if self._guarded:
                    guard(p)
        if self.fresh and not self._guarded:
            self.writes.watch()
        self._built = True

    _built = False

    # The default stays when the interpreter ends, where names of modules are None.
    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._built and not ends():
            leave_elements(self)

    # ------------------------------------------------------------------ storage

    def _build_storage(self) -> None:
        """Move the elements into flat buffers and make every parameter a view of `full`. Called once.

        Collective over `axes.shard` if a parameter is lazy and its weights rest replicated: each rank reads its own part of the
        file, then all ranks all-gather the parts.
        """
        layout, device = self.layout, self.mesh.device
        sources = [lazy_source(p) for p in self.params]
        streamed = any(source is not None for source in sources)
        self.at_rest = plan_at_rest(
            layout,
            self.axes.shard.rank,
            self.trainable,
            self.dtype,
            frozen=self.precision.frozen_dtype(self.dtype, self.loaded_dtypes),
            placements=self.placements,
            storage=self.storage,
            precision=self.precision,
            spread=self.axes.shard.size < self.mesh.shard.size,
        )
        self.resting = self.at_rest.interval
        # 1D, compute dtype. Not zeroed if weights rest sharded: the storage is then freed without being touched.
        new = torch.zeros if self.is_replicated else torch.empty
        self.full = new(layout.numel, dtype=self.dtype, device=device)
        states = states_of(self.at_rest, self.full, self.storage, self.precision.grads)
        self.shard, self.master, self.gradient = states.shard, states.master, states.gradient
        self.second = second_copy(self.at_rest, self.axes.second, device)
        self.writes = UserWrites(self.params, layout, self.full)
        with opened(self.master, changed=True) as masters:
            self._take_over(masters, sources, streamed)
            self.masters_changed()
            self.deliver(masters)
        self.storage.link.wait_device()
        if streamed and self.is_replicated:
            self._gather_streamed()
        self._is_outdated = False
        self.reshard()

    def _take_over(self, masters: torch.Tensor, sources: Sequence[WeightSource | None], streamed: bool) -> None:
        """Fill the masters from the loaded parameters (fp32 weights keep their low bits); make parameters views. Local."""
        first, last = self.owned if streamed else self.resting
        mine = masters[first - self.resting[0] : last - self.resting[0]]
        for slot, p, source in zip(self.layout.slots, self.params, sources, strict=True):
            if source is not None:
                read_overlap(mine, first, source, slot)
                release(p)
            elif streamed or self.at_rest.separate or self.master is not self.shard:
                copy_overlap(mine, first, p.detach().reshape(-1), slot.offset)
            view = self.full[slot.offset : slot.stop].view(slot.shape)
            if not streamed and self.is_replicated:
                view.copy_(p.detach())
            p.data = view

    def _gather_streamed(self) -> None:
        """All-gather replicated states, of which each rank has read only its own part. Collective over `axes.shard`."""
        if self.resting == (0, self.layout.numel):  # gather `source`, so that masters keep all bits of an fp32 file
            collectives.all_gather(self.axes.shard, self.source).wait()
        self.fresh = False
        self.unshard()
        self.wait_unshard()

    @property
    def source(self) -> Any:
        """This rank's weights, 1-D, in their widest dtype: fp32 masters, or the resting dtype of frozen weights.

        A tensor if they are in memory; on disk, an object that reads a requested interval. To write, open `master` and call
        `masters_changed`.
        """
        return self.master.elements

    @property
    def grad(self) -> torch.Tensor | None:
        """Reduced gradient of the window so far, 1-D like `source`; on the host if the optimizer state is offloaded."""
        return self.gradient.values

    def interval(self, placement: Placement) -> tuple[int, int]:
        """Interval of the flat buffer that this rank holds at `placement`."""
        if placement is Placement.SHARD:
            return self.layout.shard(self.axes.shard.rank)
        return 0, self.layout.numel

    @property
    def owned(self) -> tuple[int, int]:
        """Interval that this rank counts when each element must be counted exactly once over `axes.shard`."""
        return self.layout.shard(self.axes.shard.rank)

    def fragment(self, slot: ParamSlot) -> tuple[int, int]:
        """Interval [start, stop) of `source` and `grad` that belongs to `slot`; empty (start == stop) if none does."""
        start, stop = self.resting
        first = min(max(slot.offset, start), stop)
        return first - start, max(min(slot.stop, stop), first) - start

    # ------------------------------------------------------------------ weights

    @property
    def resident(self) -> bool:
        """Whether the storage of the full weights is allocated."""
        return self.layout.numel == 0 or self.full.untyped_storage().nbytes() > 0

    def unshard(self) -> None:
        """Start to fill `full` with the current weights, unless it already holds them. Collective over `axes.shard`."""
        if self.fresh:
            return
        storage = self.full.untyped_storage()
        with torch.autograd._unsafe_preserve_version_counter(self.full), torch.no_grad():
            if not self.resident:
                storage.resize_(self.layout.numel * self.full.element_size())
                in_huge_pages(self.full)
            if self.second is not None and self.second.holds:
                self._gather = self.second.gather(self.full)
            else:
                self._gather = self._fill_full() if self.at_rest.separate else self._gather_full()
        self.fresh = self._keepable = True

    def _fill_full(self) -> collectives.Handle:
        start, stop = self.resting
        values = self.shard.get()
        with self.storage.link.beside(values) as arrival:
            self.full[start:stop].copy_(values, non_blocking=True)
            gather = self._gather_full()
        self.shard.release(after=arrival)
        return collectives.Handle([gather, *arrival])

    def _gather_full(self) -> collectives.Handle:
        if self.resting == (0, self.layout.numel):
            return collectives.Handle([])
        return collectives.all_gather(self.axes.shard, self.full)

    def wait_unshard(self) -> None:
        """Wait for the gather. Afterwards the parameters can be read. Local."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
        if self._guarded:
            self._guarded = False
            for p in (*self.params, *self.writes.aliases):
                unguard(p)
            if self.is_written:
                self.writes.watch()

    def _guard(self) -> None:
        if not self._guarded:
            self._guarded = True
            for p in (*self.params, *self.writes.aliases):
                guard(p)

    def reshard(self) -> None:
        """Free the full weights if they rest sharded and are not pinned. Local."""
        if self.is_replicated or self.pins:
            if self.is_cut and not self.pins and self._gather is None:
                self._guard()
            return
        if self._gather is not None:  # never free what a collective still writes into
            self._gather.wait()
            self._gather = None
        self.take_writes()
        if self.second is not None and self._keepable:
            self.second.keep(self.full)
        self.fresh = self._keepable = False
        self._guard()
        with torch.autograd._unsafe_preserve_version_counter(self.full):
            self.full.untyped_storage().resize_(0)

    def take_writes(self) -> None:
        """Copy weights that user code has written since the gather into the masters. Local.

        Each rank takes its own elements: as in plain data parallelism, every rank must write the same values.
        """
        if not self.is_written or not self.fresh or self._guarded or not self.writes.happened:
            return
        self.wait_unshard()
        self.writes.take_back()
        self.num_changes += 1
        if self.adopt_full():
            self.write_back()
            self.storage.link.wait_device()
        self._is_outdated = False  # `full` has what was written
        self.writes.watch()

    def take_moved(self) -> bool:
        """`UserWrites.take_back`, counted: the masters may be part of `full`. Local."""
        moved = self.writes.take_back()
        self.num_changes += moved
        return moved

    @torch.no_grad()
    def adopt_full(self) -> bool:
        """Copy elements of `full` that differ into the masters; False if the masters are part of `full`. Local."""
        if not self.at_rest.separate and self.master is self.shard:
            return False
        start, stop = self.resting
        with opened(self.master, changed=True) as masters:
            new = self.full[start:stop].to(masters.device)
            # Only changed elements: the others keep the low bits that the compute dtype cannot hold.
            torch.where(new == masters.to(new.dtype), masters, new.to(masters.dtype), out=masters)
        self.masters_changed()
        self._keepable = self.fresh
        return True

    def fetch(self) -> None:
        """Start to load the next gather's input into memory, unless it is already there. Local."""
        if not self.fresh and not (self.second is not None and self.second.holds):
            self.shard.fetch()

    def masters_changed(self) -> None:
        """Note that `master` was written. Call `write_back` or `weights_changed` before the next gather. Local."""
        self.num_changes += 1
        self._is_outdated = not self.trainable
        self._stale_shard = self.shard is not self.master
        self._forget_second()

    def _forget_second(self) -> None:
        self._keepable = False
        if self.second is not None:
            self.second.holds = False

    def write_back(self) -> None:
        """Copy the masters into the all-gather's input, if they were written. Local.

        A copy to the device is asynchronous: call `storage.link.wait_device()` before the next gather.
        """
        if self._stale_shard:
            self.deliver(self.master.get())
            self.master.release()

    def deliver(self, masters: torch.Tensor) -> None:
        """Like `write_back`, for a caller that already holds the master tensor. Local."""
        if self._stale_shard:
            self._stale_shard = False
            with torch.no_grad():
                self.storage.link.deliver(self.shard.get(blank=True), masters)
            if self.shard.tier is Tier.DISK:  # the disk write reads host memory, which must be filled first
                self.storage.link.wait_host()
            self.shard.release(changed=True)

    def weights_changed(self) -> None:
        """Note that `source` was stepped, so `full` is outdated. From now on, reads wait for the next gather. Local."""
        if not self.trainable and not (self._is_outdated and self.at_rest.separate):
            return
        self._is_outdated = False
        if self.pins:
            raise ModelError("weights were changed inside `with hf_dist.gathered(...)`: leave the block before a step")
        if not self.is_replicated:
            self.writes.stop()  # what user code wrote was taken before the step
            self._forget_second()  # on all ranks alike, even on a rank that stepped no element
            self.reshard()
            return
        if self._gather is not None:  # a gather of the old weights: its transfers must not be dropped half-way
            self._gather.wait()
            self._gather = None
        self.fresh = False
        self._guard()
        if self._kept:
            self.unshard()

    @property
    def is_hidden(self) -> bool:
        """Whether the guard answers for the parameters."""
        return self._guarded

    @property
    def is_cut(self) -> bool:
        """Whether parameters are slices now, which user code would take for whole ones."""
        return self.share is not None and id(self) in self.share.groups and id(self) not in self.share.whole

    @property
    def is_replicated(self) -> bool:
        """Whether the full weights rest on this rank between uses."""
        return self.at_rest.whole or self._kept

    def make_readable(self, name: str) -> None:
        """Called by the guard. Waits for replicated weights in flight; raises for freed weights.

        It also raises for weights that were prefetched for hooks which never ran: no hook would wait for them in backward.
        Weights that no other rank holds a part of are gathered, and from then on they rest whole: views of them, and a
        backward that no hook announces, would find them freed.
        """
        if self.reach():
            return
        if self.is_cut:
            raise FreedParameterError(
                f"parameter {name} is cut by tensor_parallel: this rank has a slice of it. Outside of the model's forward and "
                "backward, read it whole inside `with hf_dist.gathered(model):`, on every rank, and change it with "
                "modifier_rank=0; hf_dist.full_gradient(parameter) is its whole gradient, hf_dist.full_shape its shape."
            )
        awaited = self.fresh and (self._gather is None or self.is_replicated)
        if not awaited and gathers_alone(self):
            self._kept = True
            self.unshard()
        elif not awaited:
            raise FreedParameterError(
                f"parameter {name} was read while only a shard of it is in memory (ZeRO stage 3 frees full weights outside "
                "a module's forward and backward). Read it inside `with hf_dist.gathered(model):`, on every rank; save "
                "with `trainer.save_model` or `model.save_pretrained`, on every rank; instead of `block.forward(x)`, "
                "`block(x)`."
            )
        self.wait_unshard()

    # ---------------------------------------------------------------- gradients

    def begin_backward(self, reduces: bool) -> bool:
        """`reduces`: a reduction follows this backward. Returns whether autograd accumulates gradients in `.grad`. Local."""
        return self.window.begin_backward(reduces, self.dtype)

    def reduce(self) -> collectives.Handle:
        """Start averaging the window's gradient over `axes.shard`; the result is added to `grad` when the handle completes.

        Collective over `axes.shard`, in the same order on every rank. A parameter without a gradient contributes zeros.
        """
        full = self.window.take()
        if self.placements.optim is not Placement.SHARD:
            handle, out = collectives.all_reduce(self.axes.shard, full), full
        elif self.axes.shard.size == 1:
            handle, out = collectives.Handle([]), full
        else:
            out = in_huge_pages(torch.empty(self.layout.shard_numel, dtype=self.precision.reduced, device=full.device))
            handle = collectives.reduce_scatter(self.axes.shard, full, out)
        return collectives.Handle([handle], lambda: self.gradient.add(out))

    def resident_nbytes(self) -> dict[Tier, int]:
        """Bytes that weights and masters take at rest, by tier; host bytes include the space kept for gradients."""
        held = dict.fromkeys(Tier, 0)
        if self.resident:
            held[Tier.DEVICE] += self.full.numel() * self.full.element_size()
        for state in {id(s): s for s in (self.master, self.shard)}.values():
            if self.at_rest.separate or state is not self.shard:  # else the state is a part of `full`
                held[state.tier] += state.nbytes
        held[Tier.DEVICE] += self.second.nbytes if self.second is not None else 0
        held[Tier.HOST] += self.gradient.host_nbytes
        return held

    def multiply_gradient(self, factor: float) -> None:
        """Multiply all gradients of the window so far by `factor`, reduced or not. Local."""
        self.window.multiply(factor)
        if self.grad is not None:
            self.grad.mul_(factor)

    def release_gradient(self) -> None:
        """Free the reduced gradient after the optimizer has read it; `window.used` is kept. Local."""
        self.gradient.drop()

    def zero_gradient(self, index: int, set_to_none: bool = True) -> None:
        """Forget the gradient of one parameter, or set it to zero if it exists; its transfers must be complete. Local."""
        used = self.window.used[index]
        self.window.forget(index)
        self.window.used[index] = used and not set_to_none
        if self.grad is not None:
            start, stop = self.fragment(self.layout.slots[index])
            self.grad[start:stop].zero_()

    def drop_gradients(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the window, whose reductions must be complete, or set those that exist to zero. Local."""
        self.window.drop(set_to_none)
        if set_to_none:
            self.gradient.drop()
        elif self.grad is not None:
            self.grad.zero_()
