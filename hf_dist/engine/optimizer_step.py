"""The optimizer step of one engine: which optimizers step, whether a step is skipped, what follows for the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_dist.config import DistConfig
from hf_dist.engine.window import Window
from hf_dist.errors import ConfigError, ModelError, Problem
from hf_dist.log import say_once
from hf_dist.optim.attach import FragmentedOptimizer
from hf_dist.optim.build import is_from_config
from hf_dist.optim.compressed import Compressed
from hf_dist.optim.fragment import OfParameter
from hf_dist.optim.in_backward import KEY as IN_BACKWARD
from hf_dist.optim.loss_scale import DynamicLossScaler
from hf_dist.optim.low_precision_states import rounding_of
from hf_dist.optim.not_finite import NotFinite
from hf_dist.optim.optimizers import Optimizers
from hf_dist.optim.skipped import SkippedSteps
from hf_dist.optim.step_scaling import StepScaling
from hf_dist.optim.stepping import check_whole, sight_of
from hf_dist.optim.unused import UnusedParameters
from hf_dist.parallel.local_sgd.outer import OuterOptimizer, refuse_other_weights
from hf_dist.parallel.local_sgd.served import ServedOuter
from hf_dist.sharding.runtime import ShardedModel
from hf_dist.sharding.tied_views import TiedViews

__all__ = ["OptimizerStep"]


class OptimizerStep:
    """Steps the fragments of one sharded model with the gradients of one window."""

    def __init__(
        self,
        sharded: ShardedModel,
        config: DistConfig,
        window: Window,
        optimizers: Optimizers,
        *,
        scaler: DynamicLossScaler | None,
        outer: OuterOptimizer | ServedOuter | None,
        tied_views: TiedViews,
    ) -> None:
        """`scaler`: of fp16; `outer`: of replicas that train alone; `tied_views`: parameters that are the same elements."""
        self.sharded = sharded
        self.window = window
        self.optimizers = optimizers
        self.scaler = scaler
        self.outer = outer
        self.tied_views = tied_views
        self.count = 0
        """Steps so far, skipped ones included."""
        self.skips = SkippedSteps()
        self.not_finite = NotFinite()
        self._checks_bf16 = config.bf16.enabled and config.bf16.check_grad_overflow
        self._unused = UnusedParameters(sharded, allowed=config.zero_optimization.ignore_unused_parameters)

    def attach(
        self, optimizer: torch.optim.Optimizer, config: DistConfig, beside: Sequence[torch.optim.Optimizer] = ()
    ) -> FragmentedOptimizer:
        """Let `optimizer` step this rank's fragments of its parameters, in place of all others but `beside`. Collective.

        `config`: the engine's, which alone keeps it.

        Raises `ConfigError` or `ModelError`, with nothing changed.
        """
        sight = sight_of(optimizer)
        check_whole(sight.stepping, optimizer, config)
        early = config.hf_dist.optimizer_in_backward
        sends = any(isinstance(each, Compressed) for each in (optimizer, *beside))
        if beside and (early or sends or self.outer is not None):
            key, value = (IN_BACKWARD if early else "local_sgd.enabled"), "true"
            if sends:
                key, value = "optimizer", "a 1-bit optimizer"
            raise ConfigError(
                Problem(key, value, "takes one optimizer", "Give all parameters to one, in several param groups.")
            )
        if (section := config.optimizer) is not None and not is_from_config(optimizer):
            say_once(
                f'the "optimizer" of the JSON ({section.type}) is not used: the program has given {type(optimizer).__name__}, '
                "which trains with its own options"
            )
        rounding = rounding_of(config, self.sharded.mesh.world.rank)
        if self.outer is not None:
            refuse_other_weights(optimizer)
        kept = [self.optimizers.of(other) for other in beside]
        new = FragmentedOptimizer(self.sharded, optimizer, one_by_one=early, sight=sight, rounding=rounding)
        self.optimizers.replace([*kept, new], in_backward=early)
        return new

    def take_group_writes(self) -> None:
        """Show the model what user code has written through the optimizer's param groups. Collective if there is any.

        Raises `ModelError` if it has written the model's parameters, too, since the last step: which was first is not known.
        """
        if self.optimizers.take_writes():
            for group in self.sharded.trainable_groups:
                if group.full.is_current and group.full.writes.counted:
                    raise ModelError(
                        f"weights ({group.layout.slots[0].name} or a neighbour) were written through optimizer.param_groups "
                        "and through model.parameters() between two steps: write them in one of the two ways"
                    )
            self.sharded.weights_changed()

    def switch_mode(self, mode: str, optimizer: torch.optim.Optimizer) -> None:
        """Call the optimizer's `train` or `eval` method, which may write weights. Collective at stages 1 and 2."""
        self.sharded.take_writes()  # schedule-free optimizers interpolate the masters in place, which lack those writes
        self.optimizers.of(optimizer).switch(mode)
        self.sharded.weights_changed()

    def apply(self, by_hand: torch.optim.Optimizer | None = None) -> None:
        """Step with the window's gradient and start to all-gather replicated weights. See `Engine.apply_gradients`."""
        if not self.optimizers.members:
            raise ModelError(
                "this engine has no optimizer to step: pass optimizer= to hf_dist.initialize, prepare one with the model, or "
                'add "optimizer" to the config'
            )
        # First: `p.data` that user code wrote since the last step is in the full weights, and the step changes the masters.
        self.sharded.take_writes()
        summary = self.window.summary()
        begins = self.window.begins_step(by_hand)  # else it goes on, with another optimizer
        self.count += begins
        overflow, skip = self._is_skipped(summary.norm, begins)
        ended = False
        if begins and self.window.beside:
            skipped = overflow or (skip is not None and bool(skip))
            for each in self.window.beside:
                each.step(self.window.factor_beside, self._relative_rate(), skipped=skipped)
        # Also in a skipped step: the forwards of its microbatches have changed the statistics, on each rank differently.
        self.sharded.synchronize_buffers()
        if not overflow:
            if skip is None:  # a step that skips itself on the device is counted there, and is no news
                self.not_finite.note(summary.norm, self.count)
            self.window.unscale()  # by the scale of the backwards: `_is_skipped` has just changed that of the next window
            used = summary.used
            self._unused.look(used)
            tied = self.tied_views.before_step()
            # A meeting, or what else is done to the weights after the step, may change them.
            unit = self.sharded.read_first() if self.outer is None and not self.tied_views.views else None
            first = None if unit is None else (unit, self.sharded.gather_ahead)
            # The clip's factor goes into the step's own kernel: scaling the gradients would read and write them once more.
            scaling = StepScaling(self.window.factor, skip)
            ended = self.optimizers.sends
            self.optimizers.step(lambda f: _is_used(f, used), scaling, first, only=by_hand)
            self.tied_views.after_step(tied)
            self.optimizers.note_written()
        moved = self.outer is not None and self.outer.after_step(self.count, self.scaler)
        if moved or not overflow:  # else all ranks keep what they have gathered: a skipped step costs no all-gather
            self.sharded.weights_changed()
        self.window.stepped(by_hand, ended=ended)

    def _relative_rate(self) -> float:
        """Where the schedule is: the first group's learning rate, relative to the one it began with."""
        group = self.optimizers.members[0].optimizer.param_groups[0]
        rate, first = float(group["lr"]), float(group.get("initial_lr", group["lr"]))
        return rate / first if first else 1.0

    def synchronize_replicas(self) -> None:
        """Synchronise replicas that train alone, unless they just were. Every rank calls it, between two windows."""
        if self.outer is not None and not self.outer.met:
            self.sharded.take_writes()
            self.outer.synchronize(self.scaler)
            self.sharded.weights_changed()

    def _is_skipped(self, norm: torch.Tensor, begins: bool) -> tuple[bool, torch.Tensor | None]:
        """(whether the host skips the step, flag that makes the step skip itself or None); updates the loss scale.

        `begins`: not for a further optimizer of the same step, which is skipped as the first one is.
        """
        # With steps inside of the backward, weights are written before the norm is known: there is nothing left to skip.
        # A role that trains in another precision may overflow: then all skip together.
        checks = (self._checks_bf16 or bool(self.window.beside)) and self.window.early is None
        if checks and self._skips_on_device(norm):
            flag = (~torch.isfinite(norm)).float()
            if begins:
                self.skips.record_late(flag)
            return False, flag
        # The only wait of the host in a step. All ranks have the same norm, so they skip together without asking each other.
        overflow = (checks or self.scaler is not None) and not bool(torch.isfinite(norm))
        if begins:
            self.skips.record(overflow)
            if self.scaler is not None:
                before = self.scaler.scale
                self.scaler.update(overflow)
                self.sharded.rescale_residuals(self.scaler.scale / before)
        return overflow, None

    def _skips_on_device(self, norm: torch.Tensor) -> bool:
        return norm.is_cuda and self.optimizers.on_device and self.optimizers.defers_clip


def _is_used(part: OfParameter, used: dict[tuple[int, int], bool]) -> bool:
    return used.get((id(part.group), part.index), True)
