"""Forward and backward of a sharded model: hooks on the user's own modules, prefetch, the end of each backward.

Five sentences describe every ZeRO stage; one with nothing to do returns at once (see `placement.py`):
before a unit's forward and backward its weights are gathered; after them they rest; when its gradients are complete they
are reduced, if they rest sharded or the window ends; the optimizer steps `source`; then replicated weights are gathered.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Container, Iterable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Variable

from hf_dist import collectives
from hf_dist.offload.resting import Tier
from hf_dist.offload.storage import Storage
from hf_dist.sharding.buffers import ChangingBuffers
from hf_dist.sharding.leaves import differentiable, in_fp32, inside_object, map_plain
from hf_dist.sharding.order import IssueOrder, PassOrders
from hf_dist.sharding.pipeline_share import PipelineShare
from hf_dist.sharding.placement import Placement, Stay
from hf_dist.sharding.precision import Precision
from hf_dist.sharding.reducer import Reducer
from hf_dist.sharding.unit import Call, ShardUnit, post_backward
from hf_dist.sharding.units import containers


class Window(Protocol):
    """What a backward tells, and asks."""

    def begin_backward(self) -> bool:
        """A backward has reached the model; whether it is expected to be the last of its accumulation window."""

    def abandon(self) -> None:
        """The gradients so far belong to no step."""

    def apply_factor(self) -> None:
        """Somebody looks at the gradients."""


class Passes:
    """The pass under way through the units of one model, and the order of what it issues."""

    def __init__(
        self,
        model: nn.Module,
        reducer: Reducer,
        *,
        precision: Precision,
        storage: Storage,
        prefetch: int,
        pipeline: PipelineShare | None = None,
    ) -> None:
        """Install the hooks on `model`, whose units `reducer` has. `prefetch`: elements gathered ahead of their use."""
        self.reducer = reducer
        self.units = reducer.units
        self.root = reducer.units[0]
        self.mesh = reducer.mesh
        self.precision = precision
        self.storage = storage
        self.prefetch = prefetch
        self.params_rest = reducer.placements.params
        self.scheduled = pipeline is not None
        """A pipeline's schedule says when a backward begins and ends, not autograd."""
        self.buffers = ChangingBuffers(model, self.mesh)
        self.kinds = self._build_orders([None] if pipeline is None else pipeline.names)
        """One, or one for every pipeline stage of this rank."""
        self.select(0)
        self.before_training: Callable[[Any, Any], None] | None = None
        """Called once with the arguments of the first forward that has a backward; it may say how long units stay."""
        self.window: Callable[[], Window | None] = lambda: None
        """Of the engine, a weak reference; None where there is none."""
        self.paused = False
        """Whether the modules hold whole weights that are not ours: a forward is this rank's own affair then."""
        self._depth = 0  # how many modules that contain every unit are in their forward
        self._mixed: AbstractContextManager[Any] | None = None  # open during a forward: autocast, or given targets
        self._frame: FrameType | None = None  # of the outermost one's call, while it runs
        # Forwards of each unit that are under way.
        self._calls: dict[int, list[Call]] = {u.index: [] for u in self.units}
        self._in_backward = False
        self._num_backwards = 0
        self._install_hooks(model)

    def _build_orders(self, stages: Iterable[Container[str] | None]) -> list[PassOrders]:
        in_backward = {u.index for u in self.units if u.needed_in_backward}
        trainable = {u.index for u in self.units if u.trainable}
        return [PassOrders(self._units_of(names), in_backward, trainable) for names in stages]

    def _units_of(self, names: Container[str] | None) -> list[int]:
        return [
            u.index
            for u in self.units
            if u.is_root or names is None or any(s.name in names for g in u.groups for s in g.layout.slots)
        ]

    def select(self, number: int) -> None:
        """The passes from now on are of this kind (a position in `kinds`): another pipeline stage. Local."""
        self.orders = self.kinds[number]
        self.reducer.order = self.orders.reduce

    @property
    def unit_in_backward(self) -> str | None:
        """Name of the unit that backward reached last; None outside of backward. For reports, from any thread."""
        seen = self.orders.backward.seen
        return self.units[seen[-1]].name if self._in_backward and seen else None

    # -------------------------------------------------------------------- hooks

    def _install_hooks(self, model: nn.Module) -> None:
        # Hooks refer to this object weakly, and to a unit by its index: a strong reference from a module or a parameter
        # would close a cycle, and the buffers would wait for the cyclic collector.
        me = weakref.ref(self)

        def bind(method: Callable[..., Any], index: int | None = None) -> Callable[..., Any]:
            def hook(*args: Any, **kwargs: Any) -> Any:
                passes = me()
                if passes is None or passes.paused:
                    return None
                unit = () if index is None else (passes.units[index],)
                return method(passes, *unit, *args, **kwargs)

            return hook

        cls = type(self)
        for module in containers(model, self.units):
            module.register_forward_pre_hook(bind(cls._enter), with_kwargs=True, prepend=True)
            module.register_forward_hook(bind(cls._leave), always_call=True)
        for module in self.root.modules:
            module.register_forward_pre_hook(bind(cls._touch_root), prepend=True)
        for unit in self.units[1:]:
            for module in unit.modules:
                hook = bind(cls._pre_forward, unit.index)
                module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
                module.register_forward_hook(bind(cls._post_forward, unit.index))
        for unit in self.units:
            them = weakref.ref(unit)
            for g, group in enumerate(unit.groups):
                for i, p in enumerate(group.params if group.trainable else ()):
                    p.register_post_accumulate_grad_hook(functools.partial(_gradient_arrived, me, them, g, i))

    # ------------------------------------------------------------------ forward

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the forward of a module that contains every unit; the outermost one begins the pass."""
        if self._depth and not _runs(self._frame):  # Ctrl-C has ended a forward: torch then calls no hook
            self._end_forward()
        self._depth += 1
        if self._depth > 1:
            return None
        self._frame = sys._getframe(2)  # behind the hook: the call of the module
        if _recomputing():
            self._regather(self.root)
            return None
        if self._in_backward:  # the last backward raised; what it left behind belongs to no step
            self._abandon_window()
        if torch.is_grad_enabled():
            self.buffers.watch()
            self.begin_training(args, kwargs)
        self.orders.forward.restart()
        self._issue(self.orders.forward.reach(0))
        self.root.wait_unshard()
        self._gather_ahead(self.orders.forward, 0)
        keeps = self.params_rest is not Placement.SHARD
        inputs, self._mixed = self.precision.cast_inputs(module, args, kwargs, keeps_casts=keeps)
        if self._mixed is not None:
            self._mixed.__enter__()
        return inputs

    def begin_training(self, args: Any, kwargs: Any) -> None:
        """A window begins whose microbatches call the model like this. The first time it is collective over dp."""
        decide, self.before_training = self.before_training, None
        if decide is not None:
            decide(args, kwargs)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After it. The root stays for backward; in evaluation everything rests."""
        self._depth -= 1
        if self._depth > 0:
            return None
        self._frame = None
        if _recomputing():
            return None
        self._close_mixed()
        if self.precision.autocast is not None:
            output = in_fp32(output)
        self.reducer.settle()  # of the microbatch before: their buffers would be there beside the loss
        tensors = differentiable(output) or inside_object(output)
        # Backward begins with the root and the last unit: they stay. The last one of the common order, whether or not this
        # rank's data reached it: a rank that holds weights which another has freed would skip a gather.
        keep: set[int | None] = set()
        if tensors and torch.is_grad_enabled():
            keep = {0, self.orders.forward.last, *(u.index for u in self.units if u.stay > Stay.USE)}
        for index in self.orders.forward.rest():  # units that only other ranks' data may have used
            self.units[index].unshard()
            if index not in keep:
                self.units[index].reshard()
        for unit in self.units:
            if unit.index not in keep:
                unit.reshard()
        if keep:
            self._watch_outputs(self.root, tensors, Call(has_inputs=False))
        return None if self.precision.autocast is None else output

    def _close_mixed(self) -> None:
        if self._mixed is not None:
            self._mixed.__exit__(None, None, None)
            self._mixed = None

    def _touch_root(self, module: nn.Module, args: Any) -> None:
        """A module with root parameters was called on its own (an encoder in `generate`, say)."""
        if self._depth == 0 and not _recomputing():
            self.root.unshard()
            self.root.wait_unshard()

    def _pre_forward(self, unit: ShardUnit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if _recomputing():
            self._regather(unit)
        elif self._depth > 0:
            self._issue(self.orders.forward.reach(unit.index))
            unit.wait_unshard()
            self._gather_ahead(self.orders.forward, unit.index)
        else:
            unit.unshard()
            unit.wait_unshard()
        return self._watch_inputs(unit, args, kwargs)

    def _regather(self, unit: ShardUnit) -> None:
        """Activation checkpointing runs the forward again, with the weights of the backward.

        The reentrant kind hides a unit's outputs from autograd, so this may be the first that backward hears of it.
        """
        self._begin_backward()
        self._issue(self.orders.backward.reach(unit.index))
        unit.wait_unshard()
        self._gather_ahead(self.orders.backward, unit.index)

    def _watch_inputs(self, unit: ShardUnit, args: Any, kwargs: Any) -> Any:
        """Route differentiable inputs through an identity that tells when the call's backward has reached them."""
        unit_call = Call(has_inputs=False)
        self._calls[unit.index].append(unit_call)
        # Only early freeing asks for the arrival. Without it a block may write into its inputs in place.
        if not torch.is_grad_enabled() or self.params_rest is not Placement.SHARD:
            return None
        leaves: list[Any] = []
        map_plain(leaves.append, (args, kwargs))
        inputs = list({id(t): t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad}.values())
        hidden = any(differentiable(v) or inside_object(v) for v in leaves if not isinstance(v, torch.Tensor))
        unit_call.has_inputs = bool(inputs) or hidden
        if hidden or not inputs:  # what cannot be routed is never seen to arrive: freed at the end of backward
            return None
        me, them = weakref.ref(self), weakref.ref(unit)

        def notify() -> None:
            passes, reached = me(), them()
            if passes is not None and reached is not None:
                passes._inputs_reached(reached, unit_call)

        passed = dict(zip(map(id, inputs), post_backward(notify, *inputs), strict=True))
        return map_plain(lambda leaf: passed.get(id(leaf), leaf), (args, kwargs))

    def _post_forward(self, unit: ShardUnit, module: nn.Module, args: Any, output: Any) -> None:
        tensors = differentiable(output) or inside_object(output)
        unit_call = self._calls[unit.index].pop()
        if tensors and torch.is_grad_enabled():
            self._watch_outputs(unit, tensors, unit_call)
        # The last unit's backward comes next, its weights may stay: `_leave` decides. (Before the ranks agreed this is a
        # guess.) A recomputed forward is followed by its backward at once.
        stays = self.orders.forward.last == unit.index or (unit.stay > Stay.USE and torch.is_grad_enabled())
        if not _recomputing() and not (self._depth > 0 and stays):
            unit.reshard()

    def _watch_outputs(self, unit: ShardUnit, tensors: list[torch.Tensor], call: Call) -> None:
        me, them = weakref.ref(self), weakref.ref(unit)

        def hook(grad: torch.Tensor) -> None:
            passes, reached = me(), them()
            if passes is not None and reached is not None:
                passes._pre_backward(reached, call)

        for tensor in tensors:
            tensor.register_hook(hook)

    # ----------------------------------------------------------------- backward

    def _begin_backward(self) -> None:
        if self._in_backward or self.scheduled:
            return
        self._start_backward()
        Variable._execution_engine.queue_callback(self._finish_backward)

    def _start_backward(self, finishing: Container[int] | None = None) -> None:
        window = self.window()
        is_last = window.begin_backward() if window is not None else True
        if finishing is None:
            finishing = range(len(self.units)) if is_last else ()
        self._in_backward = True
        self._num_backwards += 1
        self.reducer.begin_backward(finishing)
        self.orders.backward.restart()
        self.reducer.order.restart()
        for unit in self.units:
            stays = self.params_rest is not Placement.SHARD or unit.stay is Stay.WINDOW
            unit.begin_backward(reduces=self.reducer.reduces(unit.index), stays=stays)

    def begin_backward(self, finishing: Container[int]) -> None:
        """Of a pipeline stage and microbatch, before autograd runs: a stage may take several runs for one backward.

        `finishing`: units whose gradients are complete after it. Select the stage's pass first. Collective over the shard axes.
        """
        self._start_backward(finishing)
        # A stage that sends tensors on has no output of the root module on which a gradient could arrive.
        self._issue(self.orders.backward.reach(0))
        self.root.wait_unshard()

    def end_backward(self) -> None:
        """After it. Collective over dp."""
        self._finish_backward()

    def _pre_backward(self, unit: ShardUnit, call: Call) -> None:
        """The first gradient arrived at the outputs of one call of `unit`."""
        self._begin_backward()
        if call.started_in == self._num_backwards:
            return
        call.started_in = self._num_backwards  # a graph that is kept goes through backward again
        unit.open_calls += call.has_inputs
        if not unit.needed_in_backward:
            return
        self._issue(self.orders.backward.reach(unit.index))
        unit.wait_unshard()
        self._gather_ahead(self.orders.backward, unit.index)

    def _inputs_reached(self, unit: ShardUnit, call: Call) -> None:
        if call.started_in == self._num_backwards:
            unit.open_calls -= 1
            self._check_complete(unit)

    def _gradient_ready(self, unit: ShardUnit, group: int, index: int) -> None:
        self._begin_backward()
        unit.groups[group].window.add(index, has_room=self.reducer.has_room(unit))
        unit.waiting.discard((group, index))
        self._check_complete(unit)

    def _check_complete(self, unit: ShardUnit) -> None:
        if unit.waiting or unit.open_calls:
            return
        if unit.frees_early:
            self._rest(unit)
        if unit.trainable and not unit.complete:
            unit.complete = True
            self.reducer.unit_complete(unit)

    def _rest(self, unit: ShardUnit) -> None:
        """This backward has read the weights of `unit`; later ones of its window may read them again."""
        if unit.stay < Stay.WINDOW or unit.index in self.reducer.finishing:
            unit.reshard()

    def _finish_backward(self) -> None:
        """Runs when autograd is through: units that did not complete on this rank still take part."""
        if not self._in_backward:
            return
        for index in self.orders.backward.rest():
            self.units[index].unshard()
            self._rest(self.units[index])
        self.reducer.finish_backward()
        for unit in self.units:
            self._rest(unit)
        self._end_backward()
        if not self.orders.agreed:
            # After the first backward all ranks use the order that was seen.
            everyone = collectives.all_gather_object(self.mesh.dp, (self.orders.seen(), self.buffers.changed()))
            self.orders.agree([seen for seen, _ in everyone])
            self.buffers.agree(changed for _, changed in everyone)

    def _abandon_window(self) -> None:
        window = self.window()
        if window is not None:
            window.abandon()
        else:
            self._end_backward()
            self.reducer.drop()

    @property
    def failed(self) -> bool:
        """Whether the last backward has ended without its end."""
        return self._in_backward and not _recomputing()

    def abandon(self) -> None:
        """No pass is under way any more; what one has left behind is cleared. Local."""
        if self.failed:
            self._end_backward()
        if self._depth and not _runs(self._frame):
            self._end_forward()

    def _end_forward(self) -> None:
        self._depth, self._frame = 0, None
        self._close_mixed()
        for unit in self.units:
            self._calls[unit.index].clear()
            unit.reshard()

    def _end_backward(self) -> None:
        self._in_backward = False
        for unit in self.units:
            unit.idle = False  # the first gradient of the next backward begins it

    # ------------------------------------------------------------------- issuing

    def _issue(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.units[index].unshard()

    def _gather_ahead(self, order: IssueOrder, current: int) -> None:
        """Start the next gathers while `current` computes: one unit, and more while the limit on weights in flight allows."""
        ahead = sum(self.units[i].numel for i in order.ahead_of(current)) if order.peek() is not None else 0
        while self.prefetch and (index := order.peek()) is not None:
            unit = self.units[index]
            if ahead and ahead + unit.numel > self.prefetch:
                break
            order.advance()
            unit.unshard()
            ahead += unit.numel
        if self.storage.params.tier is Tier.DISK:
            self._read_ahead(order)

    def _read_ahead(self, order: IssueOrder) -> None:
        """Start to read from disk what comes after that, in the order of the gathers."""
        numel, count = self.storage.ahead_numel, self.storage.ahead_count
        for unit in (self.units[i] for i in order.upcoming()):
            numel -= sum(g.layout.shard_numel for g in unit.groups)
            count -= len(unit.groups)
            if numel < 0 or count < 0:
                return
            unit.fetch()


def _gradient_arrived(
    me: weakref.ref[Passes], them: weakref.ref[ShardUnit], group: int, index: int, param: nn.Parameter
) -> None:
    """Hook of a parameter: autograd has accumulated its gradient. Called thousands of times per step."""
    unit = them()
    if unit is None or unit.idle:
        return
    passes = me()
    if passes is not None:
        passes._gradient_ready(unit, group, index)


def _runs(frame: FrameType | None) -> bool:
    """Whether the function of `frame` is still running on this thread."""
    here: FrameType | None = sys._getframe(1)
    while here is not None and here is not frame:
        here = here.f_back
    return here is not None


def _recomputing() -> bool:
    """Whether autograd is running a backward, so that a forward now is a recomputation (activation checkpointing)."""
    return torch._C._current_graph_task_id() != -1
