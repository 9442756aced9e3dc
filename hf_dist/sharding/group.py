"""One flat buffer for those parameters of a unit that share device, dtype and `requires_grad`.

Flat is storage, never identity: the `nn.Parameter` objects are kept and become views into `full` once.
`full` is allocated and freed by resizing its storage. Never re-point a view at another storage: autograd keeps aliases such
as `weight.t()`, and gradients would be silently wrong.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_dist.dist import collectives
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.errors import FreedParameterError, ModelError
from hf_dist.memory.offload.host import Gradient
from hf_dist.memory.offload.resting import Resting, Tier, opened
from hf_dist.memory.offload.storage import Storage
from hf_dist.sharding.at_rest import GroupAtRest, plan_at_rest
from hf_dist.sharding.full_weights import FullWeights, WeightState
from hf_dist.sharding.group_axes import GroupAxes
from hf_dist.sharding.guard import guard, release, set_owner, unguard
from hf_dist.sharding.hpz import second_copy
from hf_dist.sharding.layout import FlatLayout, ParamSlot
from hf_dist.sharding.lazy import WeightSource, copy_overlap, lazy_source, read_overlap
from hf_dist.sharding.messages import mean, messages_of, scattered_mean
from hf_dist.sharding.param_slice import held_slice
from hf_dist.sharding.pieces import ShardGradient
from hf_dist.sharding.placement import Placement, StatePlacements
from hf_dist.sharding.precision import Precision
from hf_dist.sharding.prepared import GradientAccess, prepare
from hf_dist.sharding.resting_weights import RestingWeights
from hf_dist.sharding.single_rank_gather import gathers_alone, leave_elements
from hf_dist.sharding.sliced_share import SlicedShare
from hf_dist.sharding.states import states_of
from hf_dist.sharding.user_writes import UserWrites
from hf_dist.sharding.window_gradient import WindowGradient
from hf_dist.tensors.full_precision import as_stored
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
        sliced: SlicedShare | None = None,
    ) -> None:
        """`sliced`: of a model that is cut along `tp`.

        Collective over `axes.shard` if a parameter is lazy and its weights rest replicated, and over the axes of copies that
        masters are cut among; else local."""
        self.params = [p for _, p in params]
        self.mesh = mesh
        self.placements = placements
        self.precision = precision
        # All of a group or none: `units.py` groups by it. Thawed later, it has no masters, so `check_still_frozen` raises.
        self.trainable = self.params[0].requires_grad
        self.axes = axes if self.trainable else axes.of_frozen
        self.dtype = precision.compute_dtype(params[0][0], self.params[0].dtype)
        self.loaded_dtypes = [p.dtype for p in self.params]
        parts = [(n, held_slice(p)) for n, p in params]
        self.layout = FlatLayout.pack(parts, axes.shard.size, self.axes.pieces, placements.wires.alignment)
        # What gradients travel in. One rank sends nothing, and keeps the wider dtype.
        wire = precision.wire(axes.shard.size)
        self.window = WindowGradient(
            self.params, self.layout, mesh.device, accumulated=precision.grads, wire=wire, divisor=axes.divisor
        )
        self.pins = 0
        """Blocks that want the full weights to stay."""
        self._stays_whole = False  # user code has read the weights outside of a pass, which this rank can gather alone
        # Norms and biases of a cut model are on every rank along `tp` and have nothing to join.
        self.share = sliced if axes.parts is mesh.tp else None
        """What all groups with slices share of a model cut along `tp`; None for other groups."""
        self.slices: list[list[TensorSlice]] | None = None
        """Slices that each rank along `tp` keeps of every parameter; None until the first request."""
        self.reach: Callable[[], bool | None] = lambda: False
        """Of the root's groups: gathers the weights for the current forward, returns whether one runs (`hooks.py`)."""
        self.access: GradientAccess | None = None
        """Implements `p.grad` of the parameters; None for frozen groups."""
        self.keeps_own = False
        """Whether the window's gradient stays this rank's own until the step, which sends what it makes of it
        (`optim/sent_momentum.py`). Equal on all ranks."""
        self._build_storage(storage)
        for slot, p in zip(self.layout.slots, self.params, strict=True):
            set_owner(p, weakref.ref(self), slot.name)
            if self.full.writable:
                unguard(p)  # the guard class must derive from the prepared class
                prepare(p)
                if self.full.is_guarded:
                    guard(p)
        if not self.full.is_guarded:
            self.full.writes.watch()
        self._built = True

    _built = False

    # The default stays when the interpreter ends, where names of modules are None.
    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        # A model may outlive its engine: a rank that can gather alone leaves its parameters their elements.
        if self._built and not ends():
            leave_elements(self)

    # ------------------------------------------------------------------ storage

    def _build_storage(self, storage: Storage) -> None:
        """Move the elements into flat buffers and make every parameter a view of `full`. Called once.

        Collective over `axes.shard` if a parameter is lazy and its weights rest replicated: each rank reads its own part of the
        file, then all ranks all-gather the parts. So do the copies of a shard, if each has a piece of its masters.
        """
        layout, device = self.layout, self.mesh.device
        sources = [lazy_source(p) for p in self.params]
        streamed = any(source is not None for source in sources)
        plan = plan_at_rest(
            layout,
            self.axes.place,
            self.trainable,
            self.dtype,
            frozen=self.precision.frozen_dtype(self.dtype, self.loaded_dtypes),
            placements=self.placements,
            storage=storage,
            precision=self.precision,
            spread=self.axes.shard.size < self.mesh.shard.size,
        )
        # 1D, compute dtype. Not zeroed if weights rest sharded: the storage is then freed without being touched.
        new = torch.zeros if plan.whole else torch.empty
        values = new(layout.numel, dtype=self.dtype, device=device)
        self.full = FullWeights(self.params, layout, values, writable=self.dtype.is_floating_point)
        states = states_of(plan, values, storage, self.precision.grads)
        self.rest = RestingWeights(plan, states, second_copy(plan, self.axes.second, device), storage, self.axes.outer)
        self.messages = messages_of(plan.wires, self.axes, layout, self.placements.wires.feedback)
        """Reductions in a wire codec, by name."""
        self.gradient = states.gradient
        self.awaiting = states.awaiting
        with opened(self.master, changed=True) as masters:
            self._take_over(masters, sources, streamed)
            self.rest.changed()
            self.rest.deliver(masters)
        self.rest.storage.link.wait_device()
        in_parts = streamed or plan.arrives_rounded
        if in_parts or not self.is_replicated:
            self.rest.spread()
        # From files each rank has read a part; weights in memory were copied whole above, without a collective. Encoded ones
        # are those that arrive, before the first step as well.
        if self.is_replicated and in_parts:
            self._gather_streamed()
        self.reshard()  # first: where weights rest sharded, the buffer was never filled, and no second copy is kept of it
        self.full.version = self.rest.version

    def _take_over(self, masters: torch.Tensor, sources: Sequence[WeightSource | None], streamed: bool) -> None:
        """Fill the masters from the loaded parameters (fp32 weights keep their low bits); make parameters views. Local."""
        first, last = self.owned if streamed else self.resting
        mine = masters[first - self.resting[0] : last - self.resting[0]]
        for index, (slot, p, source) in enumerate(zip(self.layout.slots, self.params, sources, strict=True)):
            # Straight from the file into the masters: at no time does the rank hold the whole parameter.
            if source is not None:
                read_overlap(mine, first, source, slot)
                release(p)
            elif streamed or not self.rest.in_full:
                copy_overlap(mine, first, p.detach().reshape(-1), slot.offset)
            view = self.full.view(index)
            if not streamed and self.is_replicated:
                view.copy_(p.detach())
            # Not a new parameter: the optimizer, tied modules and user code keep the object.
            p.data = view

    def _gather_streamed(self) -> None:
        """All-gather replicated states, of which each rank has read or encoded its own part. Collective over `axes.shard`."""
        if self.resting == (0, self.layout.numel):  # gather `source`, so that masters keep all bits of an fp32 file
            collectives.all_gather(self.axes.shard, self.source).wait()
        self.full.outdate()
        self.unshard()
        self.wait_unshard()

    @property
    def at_rest(self) -> GroupAtRest:
        """Which tier holds each state."""
        return self.rest.plan

    @property
    def resting(self) -> tuple[int, int]:
        """Interval [start, stop) of the flat buffer of which this rank has the masters."""
        return self.rest.plan.interval

    @property
    def master(self) -> Resting:
        """The weights that are stepped, 1-D over `resting`."""
        return self.rest.master

    @property
    def writes(self) -> UserWrites:
        """What user code has written into the parameters."""
        return self.full.writes

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

    @property
    def owned(self) -> tuple[int, int]:
        """Interval that this rank counts when each element must be counted exactly once over `axes.among`."""
        return self.layout.piece(self.axes.place)

    def fragment(self, slot: ParamSlot) -> tuple[int, int]:
        """Interval [start, stop) of `source` and `grad` that belongs to `slot`; empty (start == stop) if none does."""
        return slot.within(*self.resting)

    # ------------------------------------------------------------------ weights

    def unshard(self) -> None:
        """Start to fill `full` with the current weights, unless it already holds them. Collective over `axes.shard`."""
        read = self.pins > 0  # by user code, not by the products alone
        # Also inside `gathered`, or at a second use in one pass: the elements are there.
        if self.full.is_current:
            if not (read and self.rest.as_products):
                return
            self._drop_rounded()
        with as_stored():
            self.full.gather(functools.partial(self.rest.fill, self.full.values, self.axes.shard, whole=read))
        self.full.version = self.rest.version

    def _drop_rounded(self) -> None:
        """Inside a pass, user code wants the weights that the products have rounded. Local."""
        with as_stored():
            self.full.drain()
            self.take_writes()
            self.full.outdate()

    def wait_unshard(self) -> None:
        """Wait for the gather. Afterwards the parameters can be read. Local."""
        with as_stored():
            self.full.wait()

    def reshard(self) -> None:
        """Free the full weights if they rest sharded and are not pinned. Local."""
        if self.is_replicated or self.pins:
            if self.is_cut and not self.pins:
                self.full.hide()
            return
        # Before the buffer is freed: what user code has written since the gather would be lost. Then only weights of now may
        # become the second copy: stale ones would be gathered from it in backward.
        with as_stored():
            self.full.drain()
            self.take_writes()
            if self._full_is_master:
                self.rest.keep_second(self.full.values)
            self.full.free()

    @property
    def _full_is_master(self) -> bool:
        """Whether the full weights are the masters' of now: no step has written these since the gather."""
        return self.full.is_current and self.full.version == self.rest.version

    def take_writes(self) -> None:
        """Copy weights that user code has written since the gather into the masters. Local.

        Each rank takes its own elements: as in plain data parallelism, every rank must write the same values.
        """
        full = self.full
        # Nobody could write while the guard was on, and packed weights are read only.
        if not full.writable or full.state is not WeightState.READABLE or not full.writes.happened:
            return
        # Elements of a tensor that user code put in the place of `p.data` come back into the flat buffer first.
        full.writes.take_back()
        if self.adopt_full():
            self.rest.write_back()
            self.rest.storage.link.wait_device()
        full.writes.watch()

    def take_moved(self) -> bool:
        """`UserWrites.take_back`, counted: the masters may be part of `full`. Local."""
        moved = self.full.writes.take_back()
        if moved:
            is_master = self.full.version == self.rest.version
            self.rest.count_change()
            self.full.version = self.rest.version if is_master else self.full.version
        return moved

    def adopt_full(self) -> bool:
        """Copy elements of `full` that differ into the masters; False if the masters are part of `full`. Local."""
        if self.rest.in_full:
            self.rest.changed()
            self.full.version = self.rest.version
            return False
        self.rest.adopt(self.full.values)
        if self.full.is_current:
            self.full.version = self.rest.version
        return True

    def fetch(self) -> None:
        """Start to load the next gather's input into memory, unless it is already there. Local."""
        if not self.full.is_current:
            with as_stored():
                self.rest.fetch()

    def masters_changed(self) -> None:
        """Note that `master` was written. Call `write_back` or `weights_changed` before the next gather. Local."""
        self.rest.changed()

    def write_back(self) -> None:
        """Copy the masters into the all-gather's input, if they were written (`RestingWeights.write_back`). Local."""
        self.rest.write_back()

    def weights_changed(self) -> None:
        """Note that `source` was stepped, so `full` is outdated. From now on, reads wait for the next gather. Local."""
        outdated, self.full.version = self.full.version != self.rest.version, self.rest.version
        if not self.trainable and not (outdated and self.at_rest.separate):
            return
        # The block would end with weights of before the step, and a modifier would write them over the stepped ones.
        if self.pins:
            raise ModelError("weights were changed inside `with hf_dist.gathered(...)`: leave the block before a step")
        if not self.is_replicated:
            self.full.writes.stop()  # what user code wrote was taken before the step
            self.rest.forget_copies()  # on all ranks alike, even on a rank that stepped no element
            self.full.free()
            self.rest.spread()
            return
        # Gathered in the next forward, not here: several groups travel while the first block computes.
        self.full.outdate()
        self.rest.spread()
        if self._stays_whole:
            self.unshard()

    @property
    def is_cut(self) -> bool:
        """Whether parameters are slices now, which user code would take for whole ones."""
        return self.share is not None and id(self) in self.share.groups and id(self) not in self.share.whole

    @property
    def is_replicated(self) -> bool:
        """Whether the full weights rest on this rank between uses."""
        return self.at_rest.whole or self._stays_whole

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
        awaited = self.full.is_current and (self.full.state is not WeightState.GATHERING or self.is_replicated)
        if not awaited and gathers_alone(self):
            self._stays_whole = True
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
        into = self.sums
        if self.keeps_own:
            return collectives.Handle([], lambda: into.add(full))
        # Stage 0: every rank steps everything, so every rank needs all of the gradient.
        wire = self.messages.get("gradients")
        if self.placements.optim is not Placement.SHARD:
            handle, out = mean(self.axes.shard, full, wire, self.rest.storage.link), full
        elif self.axes.shard.size == 1:
            handle, out = collectives.Handle([]), full
        else:
            out = in_huge_pages(torch.empty(self.layout.shard_numel, dtype=self.precision.reduced, device=full.device))
            handle = scattered_mean(self.axes.shard, full, out, wire, self.rest.storage.link)
        return collectives.Handle([handle], lambda: into.add(out))

    @property
    def sums(self) -> Gradient | ShardGradient:
        """Where the window adds up what each reduction yields."""
        waits = self.awaiting is not None and (self.at_rest.is_cut or self.keeps_own)
        return self.awaiting if waits and self.awaiting is not None else self.gradient

    def resident_nbytes(self) -> dict[Tier, int]:
        """Bytes that weights and masters take at rest, by tier; host bytes include the space kept for gradients, device
        bytes what encoded messages have left out."""
        held = dict.fromkeys(Tier, 0)
        if self.full.is_allocated:
            held[Tier.DEVICE] += self.full.values.numel() * self.full.values.element_size()
        for state in {id(s): s for s in (self.master, self.rest.shard)}.values():
            if self.at_rest.separate or state is not self.rest.shard:  # else the state is a part of `full`
                held[state.tier] += state.nbytes
        held[Tier.DEVICE] += self.rest.second.nbytes if self.rest.second is not None else 0
        held[Tier.DEVICE] += self.rest.encoded_nbytes
        held[Tier.DEVICE] += sum(wire.resident_nbytes for wire in self.messages.values())
        held[Tier.HOST] += self.gradient.host_nbytes + (self.awaiting.host_nbytes if self.awaiting else 0)
        return held

    def multiply_gradient(self, factor: float) -> None:
        """Multiply all gradients of the window so far by `factor`, reduced or not. Local."""
        # Both parts: a window may be clipped between two of its backwards, when some units have been reduced already.
        self.window.multiply(factor)
        for values in self._reduced:
            values.mul_(factor)

    @property
    def _reduced(self) -> list[torch.Tensor]:
        """What has been reduced: the gradient, and what awaits the other copies."""
        found = (self.grad, None if self.awaiting is None else self.awaiting.values)
        return [values for values in found if values is not None]

    @property
    def gradient_now(self) -> tuple[torch.Tensor | None, tuple[int, int]]:
        """The gradient of the window so far, 1-D, and the interval of the flat buffer that it covers: that of the whole shard
        before the copies have combined it, `resting` afterwards. Its transfers must be complete."""
        if self.awaiting is not None and self.awaiting.values is not None:
            return self.awaiting.values, self.at_rest.awaited
        return self.grad, self.resting

    @property
    def counted(self) -> tuple[torch.Tensor | None, int, float]:
        """What this rank counts in sums over all ranks: (elements of `gradient_now`, 1-D, the first one's place in the flat
        buffer, weight of their squares). Its own gradient counts as one of those that are averaged."""
        values, (first, _) = self.gradient_now
        if values is None or self.keeps_own:
            return values, first, 1.0 / self.axes.shard.size if self.keeps_own else 1.0
        start, stop = (edge - first for edge in self.owned)
        return values[start:stop], first + start, 1.0

    def take_own(self) -> torch.Tensor:
        """Hand over this rank's own gradient of the window, fp32, 1-D over the whole layout; see `keeps_own`. Local."""
        values, interval = self.gradient_now
        assert values is not None and interval == (0, self.layout.numel), "only what `keeps_own` has kept"
        self.release_gradient()
        return values.float()

    def release_gradient(self) -> None:
        """Free the reduced gradient after the optimizer has read it; `window.used` is kept. Local."""
        self.gradient.drop()
        if self.awaiting is not None:
            self.awaiting.drop()

    def zero_gradient(self, index: int, set_to_none: bool = True) -> None:
        """Forget the gradient of one parameter, or set it to zero if it exists; its transfers must be complete. Local."""
        used = self.window.used[index]
        self.window.forget(index)
        self.window.used[index] = used and not set_to_none
        values, (first, last) = self.gradient_now
        if values is not None:
            start, stop = self.layout.slots[index].within(first, last)
            values[start:stop].zero_()

    def drop_gradients(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the window, whose reductions must be complete, or set those that exist to zero. Local."""
        self.window.drop(set_to_none)
        if set_to_none:
            self.release_gradient()
            return
        for values in self._reduced:
            values.zero_()
