"""The only interpreter of schedules: executes a rank's actions on its stages, over any transport."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from hf_dist.dist.excepthook import lost_peer
from hf_dist.dist.ranges import named
from hf_dist.log import logger
from hf_dist.parallel.pipeline.actions import Action, Kind, Schedule
from hf_dist.parallel.pipeline.backward import StageGraph
from hf_dist.parallel.pipeline.communication import Channel, channel_of
from hf_dist.parallel.pipeline.probe import TensorSpec, in_words
from hf_dist.parallel.pipeline.split import StagedModel
from hf_dist.tensors import pytree

__all__ = ["BUFFERS", "Hooks", "ScheduleRun", "Transport", "shapes_in_words", "signature"]

Run = Callable[[nn.Module, object], object]
_RECEIVES = (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)
_SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
BUFFERS = 2
"""Receives posted ahead per channel: one arrives while the other is used. Only one is posted if receives wait on the device."""


class Transport(Protocol):
    """Moves lists of tensors between neighbouring stages; each channel is first in, first out."""

    waits_on_device: bool
    """Whether a posted receive occupies a part of the device until its data arrives (NCCL kernels do)."""

    def send(self, channel: Channel, key: object, tensors: Sequence[torch.Tensor]) -> None:
        """Start sending. Equal keys mean equal shapes, on both ends."""

    def can_post(self, channel: Channel, key: object) -> bool:
        """Whether the shapes of `key` are known, so that a receive can be posted before it is needed."""

    def post(self, channel: Channel, key: object, specs: Sequence[TensorSpec] | None) -> None:
        """Start the next receive of the channel; `specs` None means those known for `key`."""

    def receive(self, channel: Channel, key: object, specs: Sequence[TensorSpec] | None) -> list[torch.Tensor]:
        """Wait for the next transfer, posted or not; returns leaf tensors with the sender's `requires_grad`."""

    def finish(self) -> None:
        """Wait until all sends are complete."""


class Hooks:
    """Callbacks for an engine that shards or reduces; each method does nothing by default.

    "Stage" means a pipeline stage, not a ZeRO stage. If a rank has several stages, each has its own last backward.
    """

    def before_forward(self, stage: int, microbatch: int) -> None:
        """Called right before the model runs. The root's post-forward hook may not run: a stage ends by an exception."""

    def after_forward(self, stage: int, microbatch: int) -> None:
        """Called right after the forward, also if the stage ended it early."""

    def before_backward(self, stage: int, microbatch: int, is_last: bool) -> None:
        """Called before a backward that adds weight gradients: B, I (for weights that several nodes lead to) or W.

        `is_last`: no other such backward of this stage follows in the step.
        """

    def after_backward(self, stage: int, microbatch: int, is_last: bool) -> None:
        """Called after that backward."""

    def action(self, action: Action) -> None:
        """Called before every action, including sends and receives; for tracing."""


def signature(microbatch: object) -> tuple[object, ...]:
    """Shapes and dtypes of a microbatch, which determine the shapes between stages."""
    return tuple(
        (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else type(x) for x in pytree.leaves(microbatch)
    )


def shapes_in_words(of: tuple[object, ...]) -> str:
    """A `signature` for an error: `2x7 int64, 2x7 int64`, the tensors alone."""
    return ", ".join(in_words(*entry) for entry in of if isinstance(entry, tuple))


class ScheduleRun:
    """One step of one rank: the schedule, the microbatches, and the tensors in flight.

    Every rank of the pipeline creates one with the same schedule and microbatches, and calls `run` (or performs the actions
    one by one). The error of a failing action is raised after logging the grid and the action's position in it.
    """

    def __init__(
        self, staged: StagedModel, schedule: Schedule, rank: int, transport: Transport, hooks: Hooks | None = None
    ) -> None:
        """`schedule`: including communication; `rank`: this process's coordinate on the pipeline axis."""
        self.staged = staged
        self.schedule = schedule
        self.rank = rank
        self.actions = schedule.ranks[rank]
        self.transport = transport
        self.hooks = hooks or Hooks()
        self.results: list[object] = [None] * schedule.num_microbatches
        """On the rank of the last stage: results of `function`, by microbatch (training losses are detached)."""
        self._train = any(a.kind is not Kind.FORWARD and a.kind.computes for a in self.actions)
        # Activation checkpointing would recompute for each part of a split backward, so `I` then does the whole backward.
        self._splits = not (any(a.kind is Kind.BACKWARD_INPUT for a in self.actions) and staged.recomputes)
        kinds = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT if self._splits else Kind.BACKWARD_INPUT)
        self._backwards_left = Counter(a.stage for a in self.actions if a.kind in kinds)
        self._graphs: dict[tuple[int, int], StageGraph] = {}
        self._inputs: dict[tuple[int, int], list[torch.Tensor]] = {}  # (stage, microbatch) -> received activations
        self._outputs: dict[tuple[int, int], list[torch.Tensor]] = {}  # activations to send
        self._specs: dict[tuple[int, int], list[TensorSpec]] = {}  # of sent activations and so of their gradients
        self._gradients: dict[tuple[int, int], list[torch.Tensor]] = {}  # received gradients of sent activations
        self._to_return: dict[tuple[int, int], list[torch.Tensor]] = {}  # gradients of received activations, to send
        self._unposted: dict[Channel, deque[Action]] = defaultdict(deque)
        self._ahead = 1 if transport.waits_on_device else BUFFERS
        self._sends_before: dict[Action, int] = {}  # receive -> number of its microbatch's sends that it may depend on
        self._sent: Counter[int] = Counter()  # sends so far, by microbatch
        sends: Counter[int] = Counter()
        for action in self.actions:
            if action.kind in _RECEIVES:
                self._unposted[self._channel(action)].append(action)
                self._sends_before[action] = sends[action.microbatch]
            sends[action.microbatch] += action.kind in _SENDS
        self._posted: dict[Channel, deque[Action]] = defaultdict(deque)

    def run(self, microbatches: Sequence[object], function: Run) -> list[object]:
        """Execute all actions and return `results`. `function(model, microbatch)` runs the model once; in training it returns
        the scaled loss to differentiate. Collective over pp."""
        self.begin(microbatches, function)
        for action in self.actions:
            self.perform(action)
        self.transport.finish()
        return self.results

    def begin(self, microbatches: Sequence[object], function: Run) -> None:
        """Set the step's data, before the first `perform`."""
        assert len(microbatches) == self.schedule.num_microbatches
        self._microbatches = microbatches
        self._signatures = [signature(m) for m in microbatches]
        self._function = function

    def perform(self, action: Action) -> None:
        """Execute the next action."""
        self._post_ahead()
        self.hooks.action(action)
        try:
            with named(action.words):
                _PERFORM[action.kind](self, action)
        except Exception as error:
            if not lost_peer(error):  # the rank that failed first logs its position
                logger.error(self._where(action))
            raise
        self._sent[action.microbatch] += action.kind in _SENDS

    # ---- computing

    def _forward(self, action: Action) -> None:
        stage, microbatch = at = (action.stage, action.microbatch)
        received = self._inputs.pop(at, [])
        self.hooks.before_forward(stage, microbatch)
        with torch.set_grad_enabled(self._train):
            # Pass views, since the tensors are not leaves in the whole model: autocast caches casts of leaves only.
            given = [t.view_as(t) for t in received]
            output = self.staged.forward(
                stage, lambda model: self._function(model, self._microbatches[microbatch]), given
            )
        self.hooks.after_forward(stage, microbatch)
        if output.sent is None:
            self.results[microbatch] = output.result.detach() if self._train else output.result
            if self._train:
                if not output.result.requires_grad:  # torch's words, as without a pipeline
                    raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")
                self._graphs[at] = StageGraph(received, [output.result])
            return
        self._specs[at] = [TensorSpec.of(t) for t in output.sent]
        if self._train:
            self._graphs[at] = StageGraph(received, output.sent)
        sent = [t.detach().requires_grad_(t.requires_grad) for t in output.sent]
        if self._is_mine(stage + 1):
            self._inputs[stage + 1, microbatch] = sent
        else:
            self._outputs[at] = sent

    def _backward(self, action: Action) -> None:
        graph, gradients = self._take(action)
        self._add_to_weights(action, lambda: graph.backward(gradients))
        self._hand_back(action, graph)

    def _backward_input(self, action: Action) -> None:
        if not self._splits:
            return self._backward(action)
        graph, gradients = self._take(action)
        # Weights that several nodes lead to get their gradients here, but never last: W of this microbatch follows.
        self._hooked(action, False, lambda: graph.backward_input(gradients))
        self._hand_back(action, graph)
        self._graphs[action.stage, action.microbatch] = graph

    def _backward_weight(self, action: Action) -> None:
        if self._splits:
            self._add_to_weights(action, self._graphs.pop((action.stage, action.microbatch)).backward_weight)

    def _add_to_weights(self, action: Action, backward: Callable[[], None]) -> None:
        self._backwards_left[action.stage] -= 1
        self._hooked(action, self._backwards_left[action.stage] == 0, backward)

    def _hooked(self, action: Action, is_last: bool, backward: Callable[[], None]) -> None:
        self.hooks.before_backward(action.stage, action.microbatch, is_last)
        backward()
        self.hooks.after_backward(action.stage, action.microbatch, is_last)

    def _take(self, action: Action) -> tuple[StageGraph, list[torch.Tensor | None]]:
        at = (action.stage, action.microbatch)
        graph = self._graphs.pop(at)
        if at not in self._specs:
            return graph, [None]  # a loss
        arrived = iter(self._gradients.pop(at, []))
        return graph, [next(arrived) if spec.requires_grad else None for spec in self._specs.pop(at)]

    def _hand_back(self, action: Action, graph: StageGraph) -> None:
        if action.stage == 0:
            return
        gradients = graph.gradients()
        graph.received = []
        if self._is_mine(action.stage - 1):
            self._gradients[action.stage - 1, action.microbatch] = gradients
        else:
            self._to_return[action.stage, action.microbatch] = gradients

    # ---- moving

    def _send_forward(self, action: Action) -> None:
        tensors = self._outputs.pop((action.stage, action.microbatch))
        self.transport.send(self._channel(action), self._key(action.stage, action.microbatch), tensors)

    def _send_backward(self, action: Action) -> None:
        tensors = self._to_return.pop((action.stage, action.microbatch))
        if tensors:
            self.transport.send(self._channel(action), None, tensors)

    def _receive_forward(self, action: Action) -> None:
        key = self._key(action.stage - 1, action.microbatch)
        self._inputs[action.stage, action.microbatch] = self.transport.receive(self._channel(action), key, None)
        self._received(action)

    def _receive_backward(self, action: Action) -> None:
        if specs := self._expected_gradients(action):
            tensors = self.transport.receive(self._channel(action), None, specs)
            self._gradients[action.stage, action.microbatch] = tensors
        self._received(action)

    def _received(self, action: Action) -> None:
        channel = self._channel(action)
        queue = self._posted[channel] or self._unposted[channel]
        assert queue.popleft() == action, "receives stand in the order of their channel"

    def _post_ahead(self) -> None:
        """Post receives in each channel's order, as far as their shapes are known and buffers are free.

        If receives wait on the device, post only those that do not depend on a future send of this rank: such a send could be
        queued behind the receive of its own answer and never start, since devices have few queues.
        """
        for channel, queue in self._unposted.items():
            posted = self._posted[channel]
            while queue and len(posted) < self._ahead and self._may_post(queue[0]) and self._post(channel, queue[0]):
                posted.append(queue.popleft())

    def _may_post(self, action: Action) -> bool:
        return not self.transport.waits_on_device or self._sent[action.microbatch] >= self._sends_before[action]

    def _post(self, channel: Channel, action: Action) -> bool:
        if action.kind is Kind.RECV_FORWARD:
            key = self._key(action.stage - 1, action.microbatch)
            if not self.transport.can_post(channel, key):
                return False
            self.transport.post(channel, key, None)
        elif (action.stage, action.microbatch) not in self._specs:
            return False  # the forward has not run
        elif specs := self._expected_gradients(action):
            self.transport.post(channel, None, specs)
        return True

    def _expected_gradients(self, action: Action) -> list[TensorSpec]:
        return [spec for spec in self._specs[action.stage, action.microbatch] if spec.requires_grad]

    def _key(self, stage: int, microbatch: int) -> object:
        """The key that determines the shapes sent from `stage` to the next one."""
        return stage, self._train, self._signatures[microbatch]

    def _channel(self, action: Action) -> Channel:
        channel = channel_of(self.schedule, action)
        assert channel is not None
        return channel

    def _is_mine(self, stage: int) -> bool:
        return self.schedule.rank_of(stage) == self.rank

    def _where(self, action: Action) -> str:
        lines = []
        for rank, actions in enumerate(self.schedule.ranks):
            marked = [
                f">>> {a} <<<" if rank == self.rank and a == action else str(a) for a in actions if a.kind.computes
            ]
            lines.append(f"rank {rank}: {' '.join(marked)}")
        return f"{self.schedule.name}: rank {self.rank} failed at {action} ({action.words})\n" + "\n".join(lines)


_PERFORM: dict[Kind, Callable[[ScheduleRun, Action], None]] = {
    Kind.FORWARD: ScheduleRun._forward,
    Kind.BACKWARD: ScheduleRun._backward,
    Kind.BACKWARD_INPUT: ScheduleRun._backward_input,
    Kind.BACKWARD_WEIGHT: ScheduleRun._backward_weight,
    Kind.SEND_FORWARD: ScheduleRun._send_forward,
    Kind.SEND_BACKWARD: ScheduleRun._send_backward,
    Kind.RECV_FORWARD: ScheduleRun._receive_forward,
    Kind.RECV_BACKWARD: ScheduleRun._receive_backward,
}
"""Not bound to a run, which would then hold itself, its batches and whoever trains until the cyclic collector comes."""
