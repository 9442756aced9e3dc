"""Forward and backward of a sharded model: hooks on the user's own modules, prefetch, the end of each backward.

Five steps describe every ZeRO stage; a step with nothing to do returns at once (`placement.py`). Weights of a unit are
unsharded before its forward and before its backward. They are resharded afterwards. Complete gradients are reduced if they
rest sharded or the window ends. The optimizer steps `source`. Then replicated weights are all-gathered.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Container
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from hf_dist.dist import collectives
from hf_dist.dist.ranges import named
from hf_dist.sharding.buffers import ChangingBuffers
from hf_dist.sharding.leaves import differentiable, differentiable_leaves, in_fp32, inside_object, map_plain
from hf_dist.sharding.model_ref import Remains
from hf_dist.sharding.moments import Listener
from hf_dist.sharding.pipeline_share import PipelineShare
from hf_dist.sharding.placement import Placement, Stay
from hf_dist.sharding.precision import Precision
from hf_dist.sharding.prefetch import Prefetch
from hf_dist.sharding.reducer import Reducer
from hf_dist.sharding.running import OuterForward, recomputing
from hf_dist.sharding.unit import Call, ShardUnit, post_backward
from hf_dist.sharding.units import containers, orders_of
from hf_dist.tensors.deferred_tensor import refuse_second_derivatives


class Passes:
    """Runs one model's units through forward and backward, and fixes the order of the collectives they issue."""

    def __init__(
        self,
        remains: Remains,
        reducer: Reducer,
        listener: Listener,
        *,
        precision: Precision,
        prefetch: Prefetch,
        pipeline: PipelineShare | None = None,
    ) -> None:
        """Install the hooks on the model, whose units are `reducer.units`. `listener`: told of the moments of every pass."""
        self.reducer = reducer
        self.listener = listener
        self.units = reducer.units
        self.root = reducer.units[0]
        self.mesh = reducer.mesh
        self.precision = precision
        self.prefetch = prefetch
        self.params_rest = reducer.placements.params
        self.scheduled = pipeline is not None
        """Whether a pipeline's schedule, not autograd, announces the begin and end of each backward."""
        self.buffers = ChangingBuffers(remains, self.mesh)
        self.kinds = [orders_of(self.units, names) for names in ([None] if pipeline is None else pipeline.names)]
        """The orders of the whole model, or of each pipeline stage of this rank."""
        self.select(0)
        self.paused = False
        """True while the modules hold whole weights from elsewhere; a forward then needs no other rank."""
        self._forward = OuterForward()
        self._during_forward = ExitStack()
        """A range of a profile; autocast, or `MixedDtypes`."""
        # Running forwards of each unit.
        self._calls: dict[int, list[Call]] = {u.index: [] for u in self.units}
        self._in_backward = False
        self._num_backwards = 0
        self._install_hooks(remains.model)

    def select(self, number: int) -> None:
        """Use the orders `kinds[number]` (another pipeline stage) from now on. Local."""
        self.orders = self.kinds[number]
        self.reducer.order = self.orders.reduce

    @property
    def unit_in_backward(self) -> str | None:
        """Name of the unit that the backward reached last; None outside of a backward. Safe to read from any thread."""
        seen = self.orders.backward.seen
        return self.units[seen[-1]].name if self._in_backward and seen else None

    # -------------------------------------------------------------------- hooks

    def _install_hooks(self, model: nn.Module) -> None:
        # Hooks refer to this object weakly, and to a unit by its index: a strong reference from a module or a parameter
        # would close a cycle, and the buffers would wait for the cyclic collector.
        me = weakref.ref(self)

        def bind(method: Callable[..., object], index: int | None = None) -> Callable[..., Any]:
            def hook(*args: object, **kwargs: object) -> object:
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
        for group in self.root.groups:  # code may read a parameter without calling its module
            group.reach = bind(cls._reach_root)
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

    def _enter(self, module: nn.Module, args: object, kwargs: object) -> object:
        """Runs before the forward of a module that contains every unit; the outermost such module begins the pass."""
        # A forward that raised has left units gathered and calls open: they must not count in this one.
        if self._forward.was_cut_off:
            self._end_forward()
        # A base model inside a head, PEFT around a model: each contains all units, and only the outermost begins the pass.
        if not self._forward.enter(hooks=2):
            return None
        if recomputing():
            self._regather(self.root)
            return None
        if self._in_backward:  # the last backward raised; its gradients belong to no step
            self._abandon_window()
        self.listener.now.before_forward()
        if torch.is_grad_enabled():
            # Statistics of BatchNorm and the like: only a training forward changes them on purpose.
            self.buffers.watch()
            self.begin_training(args, kwargs)
        self._during_forward.enter_context(named("forward"))
        self.orders.forward.restart()
        self.prefetch.ahead(self.orders.forward, None)
        # Autocast caches its casts of weights. Where a unit frees its weights, a cache would keep them all (precision.py).
        keeps = self.params_rest is not Placement.SHARD
        inputs, mixed = self.precision.cast_inputs(module, args, kwargs, keeps_casts=keeps)
        if mixed is not None:
            self._during_forward.enter_context(mixed)
        return inputs

    def begin_training(self, args: object, kwargs: object) -> None:
        """Called at a training forward, with its arguments. The first call is collective over dp; later ones are local."""
        self.listener.now.before_training(args, kwargs)

    def _leave(self, module: nn.Module, args: object, output: object) -> object:
        """Runs after that forward. The root stays gathered for backward; in evaluation, all units are resharded."""
        if not self._forward.leave() or recomputing():
            return None
        self._during_forward.close()
        if self.precision.autocast is not None:
            output = in_fp32(output)
        self.reducer.drain_reductions()  # frees the previous microbatch's reduction buffers before the loss needs memory
        tensors = differentiable(output) or inside_object(output)
        # Backward begins with the root and the last unit, so they stay. "Last" is that of the common order, whether or not
        # this rank's data reached it: a rank that keeps weights which another rank has freed would skip a gather.
        keep: set[int | None] = set()
        if tensors and torch.is_grad_enabled():
            keep = {0, self.orders.forward.last, *(u.index for u in self.units if u.stay > Stay.USE)}
        # Every gather is a collective: a rank whose data took no expert or skipped a layer joins in, or the others hang.
        for index in self.orders.forward.rest():  # units that perhaps only other ranks' data used
            self.units[index].unshard()
            if index not in keep:
                self.units[index].reshard()
        for unit in self.units:
            if unit.index not in keep:
                unit.reshard()
        if keep:
            self.root.wait_unshard()  # a loss outside of the model may read it
            self._watch_outputs(self.root, tensors, Call(has_inputs=False))
        return None if self.precision.autocast is None else output

    def _touch_root(self, module: nn.Module, args: object) -> None:
        """Gather the root for a module that has its parameters: at its turn in a forward, or at once outside of one."""
        if not self._reach_root() and not recomputing():
            self.root.unshard()
            self.root.wait_unshard()

    def _reach_root(self) -> bool:
        """Gather the root at its turn and wait for it, if a forward is running; returns whether one is.

        A head has its turn after the blocks. Gathered first, it would delay the first block.
        """
        # Outside of a forward nobody knows which ranks read: `make_readable` (group.py) decides instead.
        if self._forward.depth == 0 or self.paused or recomputing():
            return False
        self.prefetch.issue(self.orders.forward.reach(0))
        self.root.wait_unshard()
        self.prefetch.ahead(self.orders.forward, 0)
        return True

    def _pre_forward(self, unit: ShardUnit, module: nn.Module, args: object, kwargs: object) -> object:
        if recomputing():
            self._regather(unit)
        elif self._forward.depth > 0:
            self.prefetch.issue(self.orders.forward.reach(unit.index))
            unit.wait_unshard()
            self.prefetch.ahead(self.orders.forward, unit.index)
        else:
            unit.unshard()
            unit.wait_unshard()
        unit.renew_casts()
        return self._watch_inputs(unit, args, kwargs)

    def _regather(self, unit: ShardUnit) -> None:
        """Gather `unit` for the forward that activation checkpointing repeats within the backward.

        The reentrant kind hides a unit's outputs from autograd, so this may be the first sign of the backward.
        """
        self._begin_backward()
        self.prefetch.issue(self.orders.backward.reach(unit.index))
        unit.wait_unshard()
        self.prefetch.ahead(self.orders.backward, unit.index)

    def _watch_inputs(self, unit: ShardUnit, args: object, kwargs: object) -> object:
        """Route differentiable inputs through an identity that reports when the call's backward reaches them."""
        unit_call = Call(has_inputs=False)
        # A stack: the forward of a unit may call the unit again.
        self._calls[unit.index].append(unit_call)
        # Only early freeing needs the report. Without the identity, a block may write into its inputs in place.
        if not torch.is_grad_enabled() or self.params_rest is not Placement.SHARD:
            return None
        inputs, hidden = differentiable_leaves((args, kwargs))
        unit_call.has_inputs = bool(inputs) or hidden
        if hidden or not inputs:  # such inputs cannot be routed: the unit is freed at the end of the backward
            return None
        me, them = weakref.ref(self), weakref.ref(unit)

        def notify() -> None:
            passes, reached = me(), them()
            # Only in the backward that has reached the outputs of the call: a retained graph can run backward again.
            if passes is not None and reached is not None and unit_call.started_in == passes._num_backwards:
                reached.open_calls -= 1
                passes._check_complete(reached)

        passed = dict(zip(map(id, inputs), post_backward(notify, *inputs), strict=True))
        return map_plain(lambda leaf: passed.get(id(leaf), leaf), (args, kwargs))

    def _post_forward(self, unit: ShardUnit, module: nn.Module, args: object, output: object) -> None:
        tensors = differentiable(output) or inside_object(output)
        unit_call = self._calls[unit.index].pop()
        if tensors and torch.is_grad_enabled():
            self._watch_outputs(unit, tensors, unit_call)
        # The last unit's backward comes next, so its weights may stay; `_leave` decides. (Before the ranks agree on an order,
        # the last unit is a guess.) A recomputed forward is followed by its backward at once.
        stays = self.orders.forward.last == unit.index or (unit.stay > Stay.USE and torch.is_grad_enabled())
        if not recomputing() and not (self._forward.depth > 0 and stays):
            unit.reshard()

    def _watch_outputs(self, unit: ShardUnit, tensors: list[torch.Tensor], call: Call) -> None:
        me, them = weakref.ref(self), weakref.ref(unit)

        def hook(grad: torch.Tensor) -> None:
            passes, reached = me(), them()
            if passes is not None and reached is not None:
                passes._pre_backward(reached, call)

        for tensor in tensors:
            # On the tensors: for a module's full backward hook torch wraps outputs, which then cannot be written in place.
            tensor.register_hook(hook)

    # ----------------------------------------------------------------- backward

    def _begin_backward(self) -> None:
        if self._in_backward or self.scheduled:
            return
        self._start_backward()
        # Runs when autograd is done with this backward: no hook of a module or tensor sees the end. FSDP2 does the same.
        Variable._execution_engine.queue_callback(self._finish_backward)

    def _start_backward(self, finishing: Container[int] | None = None) -> None:
        is_last = self.listener.now.begin_backward()
        if finishing is None:
            finishing = range(len(self.units)) if is_last else ()
        self._in_backward = True
        # Numbers tell a call of this backward from one that a retained graph runs again.
        self._num_backwards += 1
        self.reducer.begin_backward(finishing)
        self.orders.backward.restart()
        self.reducer.order.restart()
        # Counters start anew for every backward: reentrant checkpointing and retained graphs run units more than once.
        for unit in self.units:
            stays = self.params_rest is not Placement.SHARD or unit.stay is Stay.WINDOW
            unit.begin_backward(reduces=self.reducer.reduces(unit.index), stays=stays)

    def begin_backward(self, finishing: Container[int]) -> None:
        """Begin the backward of one microbatch on a pipeline stage, which may consist of several autograd runs.

        `finishing`: units whose gradients are complete after it. Call `select` for the stage first. Collective over the shard
        axes.
        """
        self._start_backward(finishing)
        # A stage that sends its output on has no output of the root module to hook.
        self.prefetch.issue(self.orders.backward.reach(0))
        self.root.wait_unshard()

    def end_backward(self) -> None:
        """End the backward that `begin_backward` began. Collective over dp."""
        self._finish_backward()

    def _refuse_second_derivatives(self) -> None:
        if self.params_rest is Placement.SHARD:
            refuse_second_derivatives("weights that ZeRO stage 3 frees in backward. Use stage 2 or lower")
        if any(self.mesh.axes.size(axis) > 1 for axis in ("tp", "cp", "ep")):
            refuse_second_derivatives(
                "what ranks of a split layer send each other. Use ZeRO without split layers or rows"
            )

    def _pre_backward(self, unit: ShardUnit, call: Call) -> None:
        """Runs when the first gradient arrives at the outputs of one call of `unit`."""
        if not self._in_backward:
            self._refuse_second_derivatives()
        self._begin_backward()
        if call.started_in == self._num_backwards:
            return
        call.started_in = self._num_backwards  # a retained graph can run backward again
        # Only a call that can report its inputs is waited for: a first layer without differentiable inputs never reports.
        unit.open_calls += call.has_inputs
        if not unit.needed_in_backward:
            return
        self.prefetch.issue(self.orders.backward.reach(unit.index))
        unit.wait_unshard()
        self.prefetch.ahead(self.orders.backward, unit.index)

    def _gradient_ready(self, unit: ShardUnit, group: int, index: int) -> None:
        self._begin_backward()
        unit.groups[group].window.add(index, has_room=self.reducer.has_room(unit))
        unit.waiting.discard((group, index))
        self._check_complete(unit)

    def _check_complete(self, unit: ShardUnit) -> None:
        # Gradients alone do not show that a unit is done: a shared or frozen part may still need its weights for its inputs.
        if unit.waiting or unit.open_calls:
            return
        if unit.frees_early:
            self._rest(unit)
        if unit.trainable and not unit.complete:
            unit.complete = True
            self.reducer.unit_complete(unit)

    def _rest(self, unit: ShardUnit) -> None:
        """Reshard `unit` after a backward, unless it stays for later backwards of the window."""
        if unit.stay < Stay.WINDOW or unit.index in self.reducer.finishing:
            unit.reshard()

    def _finish_backward(self) -> None:
        """Runs when autograd has finished. Units that did not complete on this rank still take part in their collectives."""
        if not self._in_backward:
            return
        # Units that this rank's data did not reach: other ranks gathered them, and a collective needs every rank.
        for index in self.orders.backward.rest():
            self.units[index].unshard()
            self._rest(self.units[index])
        self.reducer.finish_backward()
        for unit in self.units:
            self._rest(unit)
        self._end_backward()
        if not self.orders.agreed:
            # After the first backward, all ranks switch to the observed order.
            # Autograd's order of siblings differs from rank to rank. Collectives in different orders hang NCCL and mix up gloo.
            self.orders.agree(collectives.all_gather_object(self.mesh.dp, self.orders.seen()))

    def _abandon_window(self) -> None:
        self._end_backward()
        self.reducer.drop()
        self.listener.now.abandoned()

    @property
    def failed(self) -> bool:
        """Whether the last backward raised before `_finish_backward`."""
        return self._in_backward and not recomputing()

    def abandon(self) -> None:
        """Clear the state of a pass that raised. Local."""
        if self.failed:
            self._end_backward()
        if self._forward.was_cut_off:
            self._end_forward()

    def _end_forward(self) -> None:
        self._forward.end()
        self._during_forward.close()
        for unit in self.units:
            self._calls[unit.index].clear()
            unit.reshard()

    def _end_backward(self) -> None:
        self._in_backward = False
        for unit in self.units:
            unit.idle = False  # the first gradient of the next backward must call `_begin_backward`


def _gradient_arrived(
    me: weakref.ref[Passes], them: weakref.ref[ShardUnit], group: int, index: int, param: nn.Parameter
) -> None:
    """Parameter hook: autograd has accumulated the gradient. Called thousands of times per step."""
    unit = them()
    # `idle` first: most gradients come inside a backward in which the unit has nothing to do at this stage.
    if unit is None or unit.idle:
        return
    passes = me()
    if passes is not None:
        passes._gradient_ready(unit, group, index)
