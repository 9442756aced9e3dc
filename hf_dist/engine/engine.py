"""Composes one training step: forward and backward of a sharded model, norm, clipping, loss scale, optimizer, schedule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_dist.config import BatchSizes, DistConfig, settled
from hf_dist.dist import collectives
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.dist.ranges import named
from hf_dist.engine.checkpoints import EngineCheckpoints
from hf_dist.engine.optimizer_step import OptimizerStep
from hf_dist.engine.pipeline_runner import Pipeline
from hf_dist.engine.profile import StepProfile
from hf_dist.engine.runner import Runner, Step
from hf_dist.engine.window import Window
from hf_dist.memory.loss import TiledLoss
from hf_dist.memory.offload.host import sent
from hf_dist.memory.offload.resting import Tier
from hf_dist.optim.beside import Beside
from hf_dist.optim.loss_scale import DynamicLossScaler
from hf_dist.optim.not_finite import NotFinite
from hf_dist.optim.optimizers import Optimizers
from hf_dist.optim.raw_calls import RawCalls, route
from hf_dist.optim.skipped import SkippedSteps
from hf_dist.parallel.experts.router_loss import RouterLoss
from hf_dist.parallel.local_sgd.outer import OuterOptimizer
from hf_dist.parallel.local_sgd.served import ServedOuter
from hf_dist.parallel.sequence import SplitSequence
from hf_dist.planning.memory_budget import MemoryBudget
from hf_dist.planning.out_of_memory import explained, shape_of
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.moments import Moments
from hf_dist.sharding.ownership import check_owner
from hf_dist.sharding.runtime import ShardedModel
from hf_dist.tensors import pytree

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Losses:
    """What computes losses in another way than the model's code; None where this rank or model has no such loss."""

    tiled: TiledLoss | None = None
    router: RouterLoss | None = None


class Engine(EngineCheckpoints, RawCalls, Moments):
    """The training-loop API, with DeepSpeed's conventions. Made by `hf_dist.initialize`; the Trainer uses the same object.

    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()           # after every microbatch; steps the optimizer at the accumulation boundary
    """

    def __init__(
        self,
        *,
        sharded: ShardedModel,
        config: DistConfig,
        batch: BatchSizes,
        window: Window,
        stepping: OptimizerStep,
        runner: Runner,
        losses: Losses,
        split_sequence: SplitSequence | None = None,
        memory_budget: MemoryBudget | None = None,
    ) -> None:
        """Put finished parts together (`assembly.py` makes them) and listen to the passes of `sharded`. Local."""
        self.sharded = sharded
        self._model = sharded.model
        self.config = config
        self.batch = batch
        self.window = window
        """The gradients of the microbatches since the last step."""
        self.stepping = stepping
        """The optimizers and their step."""
        self.runner = runner
        """Runs the model, whole or in stages."""
        self.tiled_loss = losses.tiled
        """Computes head and loss without the full logits; None if the model has no such head or the config disables it."""
        self.router_loss = losses.router
        """The auxiliary loss of mixture-of-experts routers; None for a model without it."""
        self.split_sequence = split_sequence
        """Hooks that split sequences over ranks; None if sequences are whole."""
        self.memory_budget = memory_budget
        """Plans which units stay gathered; None without `hf_dist.memory_budget`."""
        self.lr_scheduler: Any = None
        """Moved by `step()`; the user's, or that of the config."""
        self.number = next(_NUMBERS)
        """Index among the engines of this process; equal on all ranks, which make engines in the same order."""
        self.profile = StepProfile.of(config.hf_dist.profile, sharded.mesh)
        """Writes a profile of some steps; None if this rank writes none."""
        sharded.listener.connect(self)

    # ------------------------------------------------------------------ the parts

    @property
    def model(self) -> nn.Module:
        """The user's own model object."""
        return self._model

    module = model

    @property
    def mesh(self) -> ParallelMesh:
        """Axes, ranks and devices."""
        return self.sharded.mesh

    @property
    def device(self) -> torch.device:
        """Where batches must be."""
        return self.mesh.device

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline stages of this rank; None without a pipeline."""
        return self.runner if isinstance(self.runner, Pipeline) else None

    @property
    def fragments(self) -> Optimizers | None:
        """Steps this rank's fragments of the parameters; None without an optimizer."""
        return self.stepping.optimizers if self.stepping.optimizers.members else None

    @property
    def beside(self) -> list[Beside]:
        """Weights of other roles that this engine's backwards train."""
        return self.window.beside

    @property
    def outer(self) -> OuterOptimizer | ServedOuter | None:
        """Synchronises replicas that train alone (`local_sgd`); None without such replicas."""
        return self.stepping.outer

    @property
    def replicas_here(self) -> OuterOptimizer | None:
        """`outer`, if the replicas are ranks of this job, which must not contact each other between two meetings."""
        return self.outer if isinstance(self.outer, OuterOptimizer) else None

    @property
    def scaler(self) -> DynamicLossScaler | None:
        """The loss scale of fp16; None in other precisions."""
        return self.stepping.scaler

    @property
    def skips(self) -> SkippedSteps:
        """The skipped steps."""
        return self.stepping.skips

    @property
    def not_finite(self) -> NotFinite:
        """Steps whose gradients were not finite."""
        return self.stepping.not_finite

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self.stepping.count

    @global_steps.setter
    def global_steps(self, value: int) -> None:
        self.stepping.count = value

    @property
    def loss_scale(self) -> float:
        """Current fp16 loss scale, 1 otherwise."""
        return self.scaler.scale if self.scaler else 1.0

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped. On GPUs it may refer to the step before that; see `optim/skipped.py`."""
        return self.skips.last

    @property
    def schedule_waits(self) -> bool:
        """Whether the schedule must not advance after the last step. Replicas that train alone skip different steps: False."""
        return self.step_was_skipped and self.replicas_here is None

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped so far."""
        return self.skips.count

    @property
    def optimizer(self) -> Any:
        """The optimizer; several of one model are one object with the param groups and states of all. None without any."""
        return None if self.fragments is None else self.fragments.optimizer

    def train(self, mode: bool = True) -> Engine:
        """Set the model's training mode."""
        self.model.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the model's evaluation mode."""
        return self.train(False)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the model's forward."""
        return self.model(*args, **kwargs)

    def attach_optimizer(self, optimizer: torch.optim.Optimizer, beside: Sequence[torch.optim.Optimizer] = ()) -> None:
        """Make `optimizer`, built over the model's parameters, step this rank's fragments of them. Collective over world.

        It takes the place of those attached before, except for the ones in `beside`, which step other parameters.
        Raises `ConfigError` or `ModelError`, with the engine unchanged.
        """
        route(optimizer, self, self.stepping.attach(optimizer, self.config, beside).calls)

    def add_param_group(self, optimizer: torch.optim.Optimizer) -> None:
        """Called by `optimizer.add_param_group`: train the new group's parameters. Local; every rank adds the same group."""
        self.stepping.optimizers.of(optimizer).add_group()

    def switch_optimizer(self, mode: str, optimizer: torch.optim.Optimizer) -> None:
        """Call the optimizer's `train` or `eval` method, which may write weights. Collective at stages 1 and 2."""
        self.stepping.switch_mode(mode, optimizer)

    # --------------------------------------------- moments of a pass (`sharding/moments.py`)

    @property
    def steps_in_backward(self) -> bool:  # type: ignore[override]
        """Whether groups are stepped as soon as their gradients are complete."""
        return self.window.early is not None

    def before_forward(self) -> None:
        """Take writes through the param groups."""
        self.stepping.take_group_writes()

    def before_training(self, args: object, kwargs: object) -> None:
        """Plan which units stay gathered, at the first training forward; a replica joins its server."""
        if self.outer is not None and self.outer.before_training():
            self.sharded.weights_changed()
        if self.memory_budget is not None:
            self.memory_budget.before_training(self, args, kwargs)

    def begin_backward(self) -> bool:
        """Begin or go on with the window; replicas that train alone note the common weights."""
        is_last = self.window.begin_backward()
        if self.outer is not None:
            self.outer.before_backward()
        return is_last

    def before_gradient_access(self) -> None:
        """Apply what the window has deferred."""
        self.window.look()

    def gradient_final(self, group: FlatGroup) -> None:
        """Step `group`, with `optimizer_in_backward`."""
        if self.window.early is not None:
            self.window.early.gradient_final(group)

    def abandoned(self) -> None:
        """The window is lost."""
        self.window.abandon()

    def in_use(self) -> bool:
        """Whether the loop around this engine still trains."""
        return self.window.loop.is_training()

    # --------------------------------------------------------------------- a step

    @property
    def micro_steps(self) -> int:
        """Microbatches of the current window for which `step()` was called."""
        return self.window.microbatches

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        self.window.microbatches = value

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current microbatch is the last of its window."""
        return self.window.is_last()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Override the count of microbatches (for a short last window); None returns to counting."""
        self.window.announced = is_boundary

    def backward(self, loss: torch.Tensor, *, scale_wrt_gas: bool = True, retain_graph: bool = False) -> torch.Tensor:
        """Backward of one microbatch; gradients are averaged over the data ranks. Every rank calls it.

        `scale_wrt_gas`: divide by the number of microbatches in the window, as needed for a loss that is a mean over its
        microbatch. Pass False if the loss is already normalised over the window. Returns `loss` unchanged. A backward that
        raises abandons the window.
        """
        check_owner(self.model, self.sharded)
        scale = self.loss_scale / (self.batch.accumulation if scale_wrt_gas else 1)
        scaled = loss if scale == 1.0 else loss.float() * scale
        self.runner.backward(scaled, self.loss_scale, retain_graph=retain_graph)
        return loss

    def run_window(self, microbatches: Sequence[object], step: Step) -> torch.Tensor:
        """Run forward and backward of one accumulation window; returns the sum of `step`'s results, 0D, equal along `pp`.

        `step(model, microbatch)` runs the model once, calls `backward` with the loss, and returns the value to report. Every
        rank calls `run_window`. Under a pipeline, `step` continues past the model call only on the rank of the last stage.
        Any exception inside abandons the window.
        """
        with self.window.abandoned_on_error():
            return self.runner.run_window(microbatches, step, loss_scale=self.loss_scale, number=self.global_steps)

    def train_batch(
        self, data_iter: Iterator[object], loss: Callable[[nn.Module, object], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """One optimizer step on the next `gradient_accumulation_steps` microbatches; their mean loss over all data ranks.

        `loss(model, microbatch)`: by default `model(**microbatch).loss`. Every rank calls it; ranks of one pipeline pass equal
        iterators. Counterpart of DeepSpeed's `PipelineEngine.train_batch`, for every layout.
        """
        if not self.model.training:
            self.train()
        window = [_to_device(next(data_iter), self.device) for _ in range(self.batch.accumulation)]

        def step(model: nn.Module, microbatch: object) -> torch.Tensor:
            value = (loss or _own_loss)(model, microbatch)
            return self.backward(value)

        with explained(lambda: self, lambda: shape_of(window[0])), self.window.abandoned_on_error():
            total = self.run_window(window, step)
            self._end_window()
        return self._mean(total, len(window))

    def eval_batch(
        self, data_iter: Iterator[object], loss: Callable[[nn.Module, object], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Mean loss of the next `gradient_accumulation_steps` microbatches over all data ranks, no gradient. Collective."""
        was_training = self.model.training
        self.eval()
        window = [_to_device(next(data_iter), self.device) for _ in range(self.batch.accumulation)]
        total = torch.stack([self.evaluate(batch, loss or _own_loss).float() for batch in window]).sum()
        self.train(was_training)
        return self._mean(total, len(window))

    def evaluate(self, batch: object, function: Callable[[nn.Module, object], object]) -> Any:
        """The result of `function(model, batch)`, which runs the model once, without gradient. Every rank calls it."""
        with named("evaluation"):
            return self.runner.evaluate(batch, function)

    def _mean(self, total: torch.Tensor, count: int) -> torch.Tensor:
        mean = total.float() / count
        collectives.all_reduce(self.mesh.dp, mean).wait()
        return mean

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Announce that the microbatches inside are not the last of their window. Works at every ZeRO stage; same result."""
        with self.window.announce(False):
            yield

    def step(self) -> None:
        """Call after every microbatch, on every rank. At the window's end, clips and steps the optimizer and the schedule."""
        if self.is_gradient_accumulation_boundary():
            self._end_window()
        else:
            self.window.microbatches += 1

    def _end_window(self) -> None:
        self.clip_grad_norm(settled(self.config.gradient_clipping) or 0.0)
        self.apply_gradients()
        if self.lr_scheduler is not None and not self.schedule_waits:
            self.lr_scheduler.step()

    def stepped_by_hand(
        self, closure: Callable[[], object] | None, optimizer: torch.optim.Optimizer, max_norm: float | None = None
    ) -> object:
        """Called by the torch optimizer's `step`. Gradients stay until `zero_grad`, and the schedule is the caller's.

        `max_norm`: clip to this norm, 0 for none; by default that of the config. The backward of `closure` adds to the
        gradients that are clipped. Returns its result.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        self.window.refuse_spent("this step would use")
        if self.window.begins_step(optimizer):
            self.clip_grad_norm(settled(self.config.gradient_clipping) or 0.0 if max_norm is None else max_norm)
        self.apply_gradients(by_hand=optimizer)
        return value

    def clip_grad_norm(self, max_norm: float = 0.0) -> torch.Tensor:
        """Return the global L2 norm of the window's gradient, then clip it if `max_norm` is positive and finite.

        Collective over dp at the first call after a backward. Later calls are local and see the clipped gradient.
        """
        return self.window.clip(max_norm)

    def clip_grad_value(self, max_value: float) -> None:
        """Clamp every element of the window's mean gradient to +-`max_value`. Collective like `clip_grad_norm`."""
        self.window.clamp(max_value)

    def apply_gradients(self, *, by_hand: torch.optim.Optimizer | None = None) -> None:
        """Step the optimizer with the window's gradient and start to all-gather replicated weights.

        Every rank calls it. A step with a non-finite gradient is skipped: neither the optimizer nor the schedule moves. fp16
        always checks; bf16 checks unless `bf16.check_grad_overflow` is false or the optimizer steps in backward. `by_hand`: the
        one optimizer whose `step` a loop has called; the gradient then stays until `zero_grad`.
        """
        if self.fragments is not None:
            self.writer.raise_failure()
        with named("optimizer step"):
            self.stepping.apply(by_hand)
        if self.profile is not None:
            self.profile.after_step(self.global_steps)

    def synchronize_replicas(self) -> None:
        """Synchronise replicas that train alone, unless they just were. Every rank calls it, between two windows."""
        self.stepping.synchronize_replicas()

    meet = synchronize_replicas  # the name of earlier versions

    def zero_grad(self, set_to_none: bool = True, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Abandon the window: drop its gradients; the next backward begins a new one. Not needed after the engine's `step()`.

        Without `set_to_none`, gradients become zeros, with which the next step still steps their parameters, as in torch.
        `optimizer`: one of several, whose parameters alone lose their gradients until the others have lost theirs. Local.
        """
        members = self.stepping.optimizers.members
        if optimizer is not None and len(members) > 1:
            own = self.stepping.optimizers.of(optimizer)
            if not self.window.zeroed_by(optimizer, {id(m.optimizer) for m in members}):
                self.sharded.zero_gradients(own.stands, set_to_none)
                return
        self.window.zero_grad(set_to_none)

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last step's gradient before clipping; None before the first step."""
        return None if self.window.norm is None else float(self.window.norm)

    def get_lr(self) -> list[float]:
        """Learning rate of each param group."""
        return [g["lr"] for g in self.optimizer.param_groups] if self.optimizer else []

    def resident_nbytes(self) -> dict[str, int]:
        """Bytes of weights, masters and optimizer state that this rank holds between steps, by tier: device, host, disk.

        `host` includes the space of offloaded gradients and transfer buffers; `device` includes no gradients.
        """
        parts = [self.sharded.resident_nbytes()]
        if self.fragments is not None:
            parts.append(self.fragments.resident_nbytes())
        if self.outer is not None:
            parts.append(self.outer.resident_nbytes())
        return {tier.value: sum(part[tier] for part in parts) for tier in Tier}


def _own_loss(model: nn.Module, microbatch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**microbatch).loss
    return loss


def _to_device(batch: object, device: torch.device) -> object:
    return pytree.mapped(lambda x: sent(x, device) if isinstance(x, torch.Tensor) else x, batch)
