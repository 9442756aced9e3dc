"""One accumulation window of one engine: from its first backward to the optimizer's step, or until it is abandoned.

    begun        a backward has reached the model: its gradients include a loss scale; their norm is unknown
    summed up    gradients are reduced over the ranks; their norm is known
    clipped      gradients are multiplied; later backwards add to clipped gradients, as in torch. If the step itself can
                 multiply, the product is deferred until the step, or until a gradient is read or added to
    stepped      a loop's own `optimizer.step()` has read the gradients, which stay as in torch: they can be read or stepped
                 again, and a further backward adds to them
    closed       abandoned, zeroed by `zero_grad`, or stepped by the engine's own loop, which needs no `zero_grad`: no gradients
                 are left; the next backward begins a new window

Announcing a backward as the last of its window is a hint that lets reductions overlap with it. Results never depend on the
hint: gradients that are not reduced by then are reduced when they are summed up.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_dist.dist.excepthook import lost_peer, timed_out
from hf_dist.errors import ModelError
from hf_dist.log import warn_once
from hf_dist.optim.beside import Beside
from hf_dist.optim.clip import (
    EarlyNorms,
    GradientSummary,
    chosen_gradients,
    clip_coefficient,
    norm_of_chosen,
    scale_gradients,
    summarize_gradients,
)
from hf_dist.optim.in_backward import KEY as IN_BACKWARD
from hf_dist.optim.in_backward import StepInBackward
from hf_dist.optim.loss_scale import DynamicLossScaler
from hf_dist.optim.optimizers import Optimizers
from hf_dist.sharding.guard import replace_method
from hf_dist.sharding.prepared import forget_gradients
from hf_dist.sharding.runtime import ShardedModel

__all__ = ["Loop", "Window", "backward_of", "loss_scale_under_way"]


class Loop:
    """What the loop that calls an engine knows. This one is a loop of the user's own, of which nothing is known."""

    makes_optimizer = False
    """Whether the loop makes and attaches the optimizer and the schedule, including those in the config."""
    scaler: DynamicLossScaler | None = None
    """The loss scale of another model whose loss is the same one; None: fp16 gets its own."""

    def is_last_microbatch(self) -> bool | None:
        """Whether the current microbatch is the last of its window; None to count calls of `step()`. Local."""
        return None

    def is_training(self) -> bool:
        """Whether the model is being trained; the Trainer's is not after `train()`. Local."""
        return True


@dataclass
class _Backward:
    loss_scale: float
    reached: dict[int, Window] = field(default_factory=dict)


_under_way: _Backward | None = None
"""One per process, not per thread: on a GPU, autograd runs hooks on its own threads."""


def loss_scale_under_way() -> float:
    """By what the loss of the backward that runs now was multiplied; 1 outside of one."""
    return 1.0 if _under_way is None else _under_way.loss_scale


@contextmanager
def backward_of(loss_scale: float) -> Iterator[None]:
    """Run a backward, whose loss was multiplied by `loss_scale`, inside; every window that it reaches records the scale.

    A backward that fails leaves incomplete gradients, so the windows that it reached are abandoned.
    """
    global _under_way
    before, _under_way = _under_way, _Backward(loss_scale)
    try:
        yield
    except BaseException as error:
        for window in _under_way.reached.values():
            window.abandon_after(error)
        raise
    finally:
        _under_way = before


class Window:
    """The gradients of one optimizer step's microbatches, and the operations applied to them."""

    def __init__(
        self, sharded: ShardedModel, accumulation: int, optimizers: Optimizers, loop: Loop | None = None
    ) -> None:
        """`accumulation`: microbatches per window, unless announced otherwise. `optimizers`: will step the gradients. `loop`:
        calls the engine. Local."""
        self.accumulation = accumulation
        self.loop = loop or Loop()
        self.microbatches = 0
        """Microbatches of this window for which `step()` was called."""
        self.announced: bool | None = None
        """Whether the current microbatch is the last one; None to count instead."""
        self.norm: torch.Tensor | None = None
        """0D norm, before clipping, of the gradient that was last summed up."""
        self.spent = False
        """Whether gradients that torch would still have were stepped and freed in backward, and no `zero_grad` has followed."""
        self.beside: list[Beside] = []
        """Weights on other ranks that are trained by the same backwards."""
        self.factor_beside = 1.0
        """By which their gradient is multiplied at the step: what clipping has multiplied this one by."""
        self._stepped_by: set[int] = set()  # ids of optimizers since the last backward
        self._zeroed_by: set[int] = set()
        self._factor: torch.Tensor | None = None  # 0D, deferred
        self._sharded = sharded
        self._optimizers = optimizers
        self._loss_scale: float | None = None  # included in the gradients; None while there are none
        self._summary: GradientSummary | None = None
        self._versions: list[int] = []  # of the gradients when they were summed up
        me = weakref.ref(self)

        def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
            window = me()
            if window is not None:
                window.abandon(set_to_none)
            forget_gradients(module)

        replace_method(sharded.model, "zero_grad", zero_grad)

    @property
    def early(self) -> StepInBackward | None:
        """Steps groups before the window's end, with `optimizer_in_backward`."""
        return self._optimizers.in_backward

    # ------------------------------------------------------------------- backward

    def is_last(self) -> bool:
        """Whether the current microbatch is expected to be the last of its window. Local."""
        if self.announced is not None:
            return self.announced
        known = self.loop.is_last_microbatch()
        return (self.microbatches + 1) % self.accumulation == 0 if known is None else known

    @contextmanager
    def announce(self, is_last: bool | None) -> Iterator[None]:
        """Announce inside the block whether the current microbatch is the last one, overriding the count. Local."""
        before, self.announced = self.announced, is_last
        try:
            yield
        finally:
            self.announced = before

    def begin_backward(self) -> bool:
        """Called when any backward reaches the model; returns whether it is expected to be the window's last. Local."""
        self.refuse_spent("this backward would add to")
        self.apply_factor()
        scale = 1.0
        if _under_way is not None:
            _under_way.reached[id(self)] = self
            scale = _under_way.loss_scale
        if self._loss_scale not in (None, scale):  # clipped meanwhile, or another model's overflow changed the scale
            self._sharded.multiply_gradients(scale / self._loss_scale)
        if self._loss_scale is None:
            self._sharded.keep_own(self._optimizers.sends)
        self._loss_scale = scale
        self._summary = None
        self._forget_calls()
        return self.is_last()

    def _forget_calls(self) -> None:
        self._stepped_by.clear()
        self._zeroed_by.clear()

    def refuse_spent(self, use: str) -> None:
        """Raise `ModelError` where torch would go on with the gradients of the last step, if they ended in backward. Local.

        `use`: what torch would do with them, as words before "the gradients of the last step".
        """
        if self.spent:
            self.spent = False
            early = self.early is not None
            freed = f"{IN_BACKWARD} frees in backward." if early else "a 1-bit optimizer turns into momentum."
            instead = ", or remove the key" if early else ""
            raise ModelError(
                f"optimizer.zero_grad() is missing after optimizer.step(): in torch {use} the gradients of the last step, "
                f"which {freed} Call optimizer.zero_grad() (or model.zero_grad()) after each step{instead}."
            )

    # ----------------------------------------------------------------- gradients

    def summary(self) -> GradientSummary:
        """Norm of the gradient, and which parameters have one. Collective over dp and `model` if gradients have changed."""
        sharded = self._sharded
        if sharded.passes.failed:  # a backward failed outside of `backward_of`
            self.abandon()
        versions = sharded.gradient_versions()
        if self._summary is None or versions != self._versions:
            if self._loss_scale is None:  # no backward: only what user code has assigned
                sharded.keep_own(self._optimizers.sends)
            norms = EarlyNorms.of(sharded)
            sharded.reduce_rest()
            stepped = self.early.norms if self.early else {}
            self._summary = summarize_gradients(sharded, 1.0 / (self._loss_scale or 1.0), stepped, norms)
            if self.beside:
                squares = sum(each.norm_squared() for each in self.beside)
                self._summary.norm = (self._summary.norm.double().square() + squares).sqrt().float()
            self.norm = self._summary.norm
            self._versions = sharded.gradient_versions()
        return self._summary

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients to a norm of at most `max_norm`; returns the norm before it, 0D. Collective like `summary`."""
        norm = self.summary().norm
        if 0 < max_norm < float("inf"):
            self.refuse_clipping("max_norm", max_norm)
            self.multiply(clip_coefficient(norm, max_norm))
        return norm

    def norm_of(self, chosen: set[int] | None, degree: float = 2.0) -> torch.Tensor:
        """0D norm of the whole gradient, or of the parameters with these ids. Collective over dp and `model`."""
        summary = self.summary()
        if chosen is None and degree == 2:
            return summary.norm
        for each in self.beside:
            each.refuse(f"the norm of degree {degree:g}" if degree != 2 else "the norm of some parameters")
        if self.early is not None:
            raise ModelError(
                f"norm_type={degree:g}: {IN_BACKWARD} frees the gradients before their norm is known, except for 2"
            )
        self.apply_factor()
        every = {id(p) for group in self._sharded.trainable_groups for p in group.params}
        return norm_of_chosen(self._sharded, every if chosen is None else chosen, degree) / (self._loss_scale or 1.0)

    def multiply(self, factor: torch.Tensor | float, chosen: set[int] | None = None) -> None:
        """Multiply the gradient of all parameters, or of those with these ids, by `factor`; also removes the loss scale.

        Collective like `summary`."""
        summary = self.summary()
        scale = self._loss_scale or 1.0
        if chosen is None:
            # On a GPU, comparing with 1 would make the host wait, so the product is always computed.
            by = factor if scale == 1.0 else factor / scale
            if (isinstance(by, torch.Tensor) and by.is_cuda) or float(by) != 1.0:
                if self._optimizers.defers_clip:
                    self._put_off(by)
                else:
                    scale_gradients(self._sharded, by)
            self._summary = GradientSummary(summary.norm * factor, summary.used)
            if self.beside:
                self.factor_beside *= float(factor)
        else:
            self.unscale()
            self.apply_factor()
            scale_gradients(self._sharded, factor, chosen)
            self._summary = None
        self._loss_scale = 1.0
        self._versions = self._sharded.gradient_versions()

    def unscale(self) -> None:
        """Divide the loss scale out of the gradients. Collective like `summary`."""
        if self._loss_scale not in (None, 1.0):
            self.multiply(1.0)

    def _put_off(self, factor: torch.Tensor | float) -> None:
        if not isinstance(factor, torch.Tensor):
            factor = torch.full((), factor, device=self._sharded.mesh.device)
        self._factor = factor if self._factor is None else self._factor * factor

    def look(self) -> None:
        """User code is about to read or write gradients. Local."""
        self.spent = False
        self.apply_factor()

    def apply_factor(self) -> None:
        """Apply the deferred factor now, because gradients are about to be read or added to. Local."""
        factor, self._factor = self._factor, None
        if factor is not None:
            known = self._versions == self._sharded.gradient_versions()
            scale_gradients(self._sharded, factor)
            if known:
                self._versions = self._sharded.gradient_versions()

    @property
    def factor(self) -> torch.Tensor | None:
        """The deferred factor, 0D, which the step applies; None if there is none."""
        return self._factor

    def clamp(self, max_value: float, chosen: set[int] | None = None) -> None:
        """Clamp the gradient's elements, of all parameters or these ids, to +-`max_value`. Collective like `summary`."""
        self.refuse_clipping("max_value", max_value)
        for each in self.beside:
            each.refuse("clipping by value")
        self.summary()
        self.unscale()
        self.apply_factor()
        for grad in chosen_gradients(self._sharded, chosen):
            grad.clamp_(-max_value, max_value)

    def refuse_clipping(self, name: str, value: float) -> None:
        """Raise `ModelError` if gradients are stepped and freed before all have arrived. Local."""
        if self.early is not None:
            raise ModelError(
                f"{name}={value:g}: gradients cannot be clipped when {IN_BACKWARD} steps them before all have arrived. Do not "
                "clip (max_grad_norm=0 in the Trainer), or remove the key."
            )

    # ----------------------------------------------------------------------- end

    @contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Abandon the window if any exception, including Ctrl-C, leaves the block."""
        try:
            yield
        except BaseException as error:
            self.abandon_after(error)
            raise

    def abandon_after(self, error: BaseException) -> None:
        """`abandon` because of `error`, which the caller raises; does nothing if a peer is lost, to avoid waiting for it."""
        if not (lost_peer(error) or timed_out(error)):
            with suppress(RuntimeError):  # the sending ranks may have failed too
                self.abandon()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`abandon` for a user's `zero_grad()`; warns once if that cuts a window short."""
        if self.microbatches:
            warn_once(
                f"zero_grad() after {self.microbatches} of {self.accumulation} microbatches: their gradients are dropped and "
                "the window begins again. With engine.step() no zero_grad() is needed."
            )
        self.abandon(set_to_none)

    def begins_step(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Whether a step of `optimizer` (None: of all) is a new one, and not the rest of one that another has begun. Local."""
        return optimizer is None or not self._stepped_by or id(optimizer) in self._stepped_by

    def stepped(self, by_hand: torch.optim.Optimizer | None, *, ended: bool = False) -> None:
        """The gradients were stepped, and end here, or stay until `zero_grad` if a loop has called one optimizer. Local.

        `ended`: the step has sent them."""
        if by_hand is None or self.early is not None or ended:
            self.close()
            self.spent = by_hand is not None
        else:
            if self.begins_step(by_hand):
                self._stepped_by.clear()
            self._stepped_by.add(id(by_hand))
        self.microbatches = 0

    def zeroed_by(self, optimizer: torch.optim.Optimizer, all_of_them: set[int]) -> bool:
        """Note the `zero_grad` of one of several optimizers (by id); whether all have called it since the backward. Local."""
        self._zeroed_by.add(id(optimizer))
        return self._zeroed_by >= all_of_them

    def abandon(self, set_to_none: bool = True) -> None:
        """Discard the gradients so far; no step uses them. Local, except that it waits for transfers in flight.

        Without `set_to_none`, parameters that had a gradient have one of zeros, which optimizers step.
        """
        if self.early is not None and self.early.norms:
            warn_once(
                f"a window was abandoned after {IN_BACKWARD} had stepped some of its parameters, which stay stepped. Without "
                "the key, a window that fails does not change the weights."
            )
        self._sharded.passes.abandon()
        self.spent = False
        self.close(set_to_none)

    def close(self, set_to_none: bool = True) -> None:
        """Drop the gradients, stepped or not; the next backward begins a new window. Local."""
        self._sharded.drop_gradients(set_to_none)
        if self.early is not None:
            self.early.end_window()
        for each in self.beside:
            each.drop()
        self.factor_beside = 1.0
        self._loss_scale = self._summary = self._factor = None
        self.microbatches = 0
        self._forget_calls()


def joint_clip(
    windows: Sequence[tuple[Window, set[int] | None]], max_norm: float, plain: Sequence[Any] = (), degree: float = 2.0
) -> torch.Tensor:
    """Clip the gradients of several models together, as torch does for one list of their parameters.

    `windows`: (window, ids of the listed parameters or None for all); `plain`: gradients of tensors that no engine holds;
    `degree`: of the norm. Returns the joint norm, 0D. Collective over dp and `model` of each window, in the given order.
    """
    norms = [window.norm_of(ids, degree) for window, ids in windows]
    device = norms[0].device if norms else None
    norms += [torch.linalg.vector_norm(grad, degree, dtype=torch.float32).to(device or grad.device) for grad in plain]
    joined = torch.stack(norms) if norms else torch.zeros(1)
    norm = joined[0] if len(joined) == 1 else torch.linalg.vector_norm(joined, degree)
    if 0 < max_norm < float("inf"):
        factor = clip_coefficient(norm, max_norm)
        for window, _ in windows:
            window.refuse_clipping("max_norm", max_norm)
        for window, ids in windows:
            window.multiply(factor, ids)
        for grad in plain:
            grad.mul_(factor.to(grad.device, grad.dtype))
    return norm
