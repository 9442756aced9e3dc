"""One accumulation window of one engine: from its first backward to the optimizer's step, or to its end without one.

    begun        a backward has reached the model: its gradients hold a loss scale, their norm is not known
    summed up    reduced over the ranks, norm known
    clipped      multiplied: whatever comes later adds to clipped gradients, as it does in torch. Where the step can multiply on
                 its way, the product is put off until the step, or until anybody looks at a gradient or adds to it
    closed       stepped, or abandoned: no gradient is left, the next backward begins another window

Whether a backward is the last of its window is a hint that lets reductions overlap it. The numbers never depend on the hint:
what was not reduced by then is reduced when the gradients are summed up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_dist.errors import ModelError
from hf_dist.failure import lost_peer, timed_out
from hf_dist.log import warn_once
from hf_dist.optim.clip import (
    GradientSummary,
    chosen_gradients,
    clip_coefficient,
    scale_gradients,
    squared_norm,
    summarize_gradients,
)
from hf_dist.optim.in_backward import KEY as IN_BACKWARD
from hf_dist.optim.in_backward import StepInBackward
from hf_dist.sharding.guard import replace_method
from hf_dist.sharding.prepared import forget_gradients
from hf_dist.sharding.runtime import ShardedModel

__all__ = ["Window", "backward_of"]


@dataclass
class _Backward:
    loss_scale: float
    reached: dict[int, Window] = field(default_factory=dict)


_under_way: _Backward | None = None
"""Of the process, not of a thread: on a GPU autograd runs hooks on threads of its own."""


@contextmanager
def backward_of(loss_scale: float) -> Iterator[None]:
    """Inside, a backward runs whose loss was multiplied by `loss_scale`; every window that it reaches takes note.

    A backward that fails leaves gradients of some parameters and not of others: the windows it has reached are abandoned.
    """
    global _under_way
    before, _under_way = _under_way, _Backward(loss_scale)
    try:
        yield
    except BaseException as error:
        for window in _under_way.reached.values():
            window.give_up(error)
        raise
    finally:
        _under_way = before


class Window:
    """Gradients of the microbatches of one optimizer step, and what was done to them."""

    def __init__(self, sharded: ShardedModel, accumulation: int) -> None:
        """`accumulation`: microbatches of a window, as long as nobody says otherwise. Local."""
        self.accumulation = accumulation
        self.microbatches = 0
        """Of this window, whose `step()` was called."""
        self.announced: bool | None = None
        """Whether the microbatch under way is the last one, where somebody has said so."""
        self.asks: Callable[[], bool] | None = None
        """Who knows it instead of a count (accelerate does)."""
        self.norm: torch.Tensor | None = None
        """0D, of the last gradient that was summed up, before clipping."""
        self.early: StepInBackward | None = None
        """Steps groups before the window's end, if that is asked for."""
        self.puts_off: Callable[[], bool] = lambda: False
        """Whether the next step multiplies gradients on its way."""
        self.on_backward: Callable[[], None] = lambda: None
        """Called whenever a backward reaches the model, before anything is stepped by it."""
        self._factor: torch.Tensor | None = None  # 0D, put off
        self._sharded = sharded
        self._loss_scale: float | None = None  # that the gradients hold, None while there are none
        self._summary: GradientSummary | None = None
        self._versions: list[int] = []  # of the gradients when they were summed up
        me = weakref.ref(self)
        sharded.passes.window = weakref.ref(self)

        def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
            window = me()
            if window is not None:
                window.abandon()
            forget_gradients(module)

        replace_method(sharded.model, "zero_grad", zero_grad)

    # ------------------------------------------------------------------- backward

    def is_last(self) -> bool:
        """Whether the microbatch under way is expected to be the last of its window."""
        if self.announced is not None:
            return self.announced
        if self.asks is not None:
            return self.asks()
        return (self.microbatches + 1) % self.accumulation == 0

    @contextmanager
    def announce(self, is_last: bool | None) -> Iterator[None]:
        """Inside, the microbatch under way is the last one, or not, whatever the count says."""
        before, self.announced = self.announced, is_last
        try:
            yield
        finally:
            self.announced = before

    def begin_backward(self) -> bool:
        """A backward has reached the model, whoever started it; returns whether it is expected to be the last. Local."""
        self.on_backward()
        self.apply_factor()
        scale = 1.0
        if _under_way is not None:
            _under_way.reached[id(self)] = self
            scale = _under_way.loss_scale
        if self._loss_scale not in (None, scale):  # clipped since, or another model's overflow has moved the scale
            self._sharded.multiply_gradients(scale / self._loss_scale)
        self._loss_scale = scale
        self._summary = None
        return self.is_last()

    # ----------------------------------------------------------------- gradients

    def summary(self) -> GradientSummary:
        """Norm of the gradient, and who has one. Collective over dp and `model` unless nothing changed since the last call."""
        sharded = self._sharded
        if sharded.passes.failed:  # a backward that nobody saw fail
            self.abandon()
        versions = sharded.gradient_versions()
        if self._summary is None or versions != self._versions:
            sharded.reduce_rest()
            stepped = self.early.norms if self.early else {}
            self._summary = summarize_gradients(sharded, 1.0 / (self._loss_scale or 1.0), stepped)
            self.norm = self._summary.norm
            self._versions = sharded.gradient_versions()
        return self._summary

    def clip(self, max_norm: float) -> torch.Tensor:
        """Multiply the gradients so that their norm is at most `max_norm`; returns it as it was, 0D. Collective."""
        norm = self.summary().norm
        if 0 < max_norm < float("inf"):
            self.refuse_clipping("max_norm", max_norm)
            self.multiply(clip_coefficient(norm, max_norm))
        return norm

    def norm_of(self, chosen: set[int] | None) -> torch.Tensor:
        """Norm of the gradient, or of that of some parameters (their ids), 0D. Collective over dp and `model`."""
        summary = self.summary()
        if chosen is None:
            return summary.norm
        self.apply_factor()
        return squared_norm(self._sharded, chosen).sqrt() / (self._loss_scale or 1.0)

    def multiply(self, factor: torch.Tensor | float, chosen: set[int] | None = None) -> None:
        """The gradient times `factor`, of all parameters or of those with these ids, without the loss scale. Local."""
        summary = self.summary()
        scale = self._loss_scale or 1.0
        if chosen is None:
            # On a GPU the comparison would make the host wait; there the product is always taken.
            by = factor if scale == 1.0 else factor / scale
            if (isinstance(by, torch.Tensor) and by.is_cuda) or float(by) != 1.0:
                if self.puts_off():
                    self._put_off(by)
                else:
                    scale_gradients(self._sharded, by)
            self._summary = GradientSummary(summary.norm * factor, summary.used)
        else:
            self.unscale()
            self.apply_factor()
            scale_gradients(self._sharded, factor, chosen)
            self._summary = None
        self._loss_scale = 1.0
        self._versions = self._sharded.gradient_versions()

    def unscale(self) -> None:
        """Take the loss scale out of the gradients. Local."""
        if self._loss_scale not in (None, 1.0):
            self.multiply(1.0)

    def _put_off(self, factor: torch.Tensor | float) -> None:
        if not isinstance(factor, torch.Tensor):
            factor = torch.full((), factor, device=self._sharded.mesh.device)
        self._factor = factor if self._factor is None else self._factor * factor

    def apply_factor(self) -> None:
        """Multiply now what was put off: somebody wants to see gradients, or to add to them. Local."""
        factor, self._factor = self._factor, None
        if factor is not None:
            known = self._versions == self._sharded.gradient_versions()
            scale_gradients(self._sharded, factor)
            if known:
                self._versions = self._sharded.gradient_versions()

    def take_factor(self) -> torch.Tensor | None:
        """What was put off, 0D, for the step that multiplies by it; None for nothing. Local."""
        factor, self._factor = self._factor, None
        return factor

    def clamp(self, max_value: float, chosen: set[int] | None = None) -> None:
        """Clamp the elements of the gradient, or of some parameters' (their ids), to +-max_value. Collective like `summary`."""
        self.refuse_clipping("max_value", max_value)
        self.summary()
        self.unscale()
        self.apply_factor()
        for grad in chosen_gradients(self._sharded, chosen):
            grad.clamp_(-max_value, max_value)

    def refuse_clipping(self, name: str, value: float) -> None:
        """Raise `ModelError` where gradients are gone before all are there."""
        if self.early is not None:
            raise ModelError(
                f"{name}={value:g}: gradients cannot be clipped when {IN_BACKWARD} steps them before all are there. Do not "
                "clip (max_grad_norm=0 in the Trainer), or remove the key."
            )

    # ----------------------------------------------------------------------- end

    @contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Whatever leaves the block by an exception, Ctrl-C too, takes the window with it."""
        try:
            yield
        except BaseException as error:
            self.give_up(error)
            raise

    def give_up(self, error: BaseException) -> None:
        """`abandon` because of `error`, which the caller raises. Nothing is waited for where a peer is gone."""
        if not (lost_peer(error) or timed_out(error)):
            with suppress(RuntimeError):  # the ranks that would send may have failed, too
                self.abandon()

    def zero_grad(self) -> None:
        """`abandon` on a user's word, who is told once where that cuts a window short."""
        if self.microbatches:
            warn_once(
                f"zero_grad() after {self.microbatches} of {self.accumulation} microbatches: their gradients are dropped and "
                "the window begins again. With engine.step() no zero_grad() is needed."
            )
        self.abandon()

    def abandon(self) -> None:
        """The gradients so far belong to no step. Local where nothing is on its way."""
        if self.early is not None and self.early.norms:
            warn_once(
                f"a window was abandoned after {IN_BACKWARD} had stepped some of its parameters: these keep the step. Without "
                "the key a window that fails leaves the weights as they were."
            )
        self._sharded.passes.abandon()
        self.close()

    def close(self) -> None:
        """The gradients were stepped, or are not wanted: the next backward begins another window. Local."""
        self._sharded.drop_gradients()
        if self.early is not None:
            self.early.end_window()
        self._loss_scale = self._summary = self._factor = None
        self.microbatches = 0


def joint_clip(
    windows: Sequence[tuple[Window, set[int] | None]], max_norm: float, plain: Sequence[Any] = ()
) -> torch.Tensor:
    """Clip the gradients of several models together, as torch does with a list of all their parameters.

    `windows`: with the ids of the parameters that were listed, None for all; `plain`: gradients of tensors that no engine
    holds. Returns the norm over all, 0D. Collective over dp and `model` of every one, in the order given.
    """
    norms = [window.norm_of(ids) for window, ids in windows]
    norms += [torch.linalg.vector_norm(grad, dtype=torch.float32).to(norms[0].device) for grad in plain]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if 0 < max_norm < float("inf"):
        factor = clip_coefficient(norm, max_norm)
        for window, _ in windows:
            window.refuse_clipping("max_norm", max_norm)
        for window, ids in windows:
            window.multiply(factor, ids)
        for grad in plain:
            grad.mul_(factor.to(grad.device, grad.dtype))
    return norm
