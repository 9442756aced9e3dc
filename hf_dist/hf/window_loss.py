"""`WindowLoss`: the share of a microbatch's loss in that of all rows of its step, for losses of every kind.

HF's Trainer knows two kinds: losses over `num_items_in_batch`, which it adds up over microbatches and ranks, and means, which
it averages. Any other kind is a mean to HF here, and weighted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hf_dist.engine.engine import Engine
from hf_dist.hf.loss_probe import IGNORED, LABELS, MEANS_OF_LABELS, LossKind, kind_of_loss, loss_kind_matters

__all__ = ["WindowLoss", "cover_trl", "tell_router_loss"]


class WindowLoss:
    """What a Trainer has found out about its model's loss. All ranks have found the same.

    Each call is given the Trainer, which a reference to would keep alive.
    """

    def __init__(self) -> None:
        self.kind = LossKind.UNDECIDED
        self.is_known = False
        self._labels: torch.Tensor | None = None
        """(2,): those of the window's batches, and those behind the first of each row; over all ranks if HF counts so."""

    def _asks(self, trainer: Any) -> bool:
        return trainer.dist is not None and not self.is_known and loss_kind_matters(trainer)

    def count(self, trainer: Any, window: Any) -> None:
        """Count the labels of the batches of a step, where a mean over them may have to be weighted. All ranks call it."""
        self._labels = None
        if not self._asks(trainer) and self.kind not in MEANS_OF_LABELS:
            return
        args = trainer.args
        own = torch.zeros(1, 2, dtype=torch.long, device=args.device)
        for batch in window:
            labels = _labels(batch)
            if labels is not None:  # on the device: the host does not wait for the numbers
                own += torch.stack(_counts(labels)).to(args.device)
        if args.average_tokens_across_devices and args.world_size > 1:
            own = trainer.accelerator.gather(own).sum(dim=0, keepdim=True)
        self._labels = own[0]

    def settle(self, trainer: Any, model: nn.Module, inputs: object) -> None:
        """Ask every batch until one can tell, on any rank, what kind of loss the model has. All ranks call it."""
        if not self._asks(trainer):
            return
        self.kind = kind_of_loss(trainer, model, inputs)
        # A set without labels may be predicted before training. Training without labels goes on without.
        self.is_known = self.kind > LossKind.MEAN_ALONE or (self.kind == LossKind.NONE and model.training)
        if self.kind in (LossKind.MEAN, *MEANS_OF_LABELS, LossKind.SUM):
            trainer.model_accepts_loss_kwargs = False

    def of_microbatch(
        self, trainer: object, compute_loss: Callable[..., object], inputs: object, num_items: Any
    ) -> object:
        """What `compute_loss(num_items)` finds, the loss (or the first of a tuple) weighted so that HF's average over the
        window is the loss of its rows together. Local; in training.
        """
        parts = _parts(trainer, getattr(trainer, "current_gradient_accumulation_steps", 1))
        labels = _labels(inputs)  # HF's takes them out for some losses
        if self.kind in (LossKind.MIXED, LossKind.MEAN_ALONE) and num_items is not None:
            # With a sum S over n items and a mean b, S / n + b / k is a k-th of the loss for n / k items.
            return _first(compute_loss(num_items / parts), lambda loss: loss / parts)
        result = compute_loss(num_items)
        if self.kind == LossKind.SUM:
            return _first(result, lambda loss: loss * parts)
        if self.kind not in MEANS_OF_LABELS or labels is None or self._labels is None:
            return result
        shifted = self.kind == LossKind.SHIFTED
        share = parts * _counts(labels)[shifted].to(self._labels.device) / self._labels[int(shifted)]

        def weighted(loss: torch.Tensor) -> torch.Tensor:
            own = share.to(loss.device)
            return torch.where(own > 0, loss, torch.zeros_like(loss)) * own  # the mean over no labels is not a number

        return _first(result, weighted)


def tell_router_loss(trainer: Any, steps: int) -> None:
    """Undo HF's scaling of a mixture's routers' loss beside one that counts items: times the ranks, not divided by the window's
    `steps`. Local."""
    engine = trainer.dist_engine
    if engine is not None and engine.router_loss is not None:
        engine.router_loss.parts = _parts(trainer, steps)


def cover_trl(engine: Engine) -> None:
    """Cover TRL's own forwards, which use Mixtral's function for the routers' loss of every family. Local."""
    if engine.router_loss is not None and "trl" in sys.modules:
        from transformers.models.mixtral import modeling_mixtral

        engine.router_loss.take_over(modeling_mixtral)


def _parts(trainer: Any, steps: int) -> int:
    """Microbatches of all ranks whose losses HF adds up, where a loss counts the items of a window of `steps`. Local."""
    return int(steps * (trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1))


def _labels(batch: object) -> torch.Tensor | None:
    labels = batch.get(LABELS) if isinstance(batch, Mapping) else None
    return labels if isinstance(labels, torch.Tensor) and labels.ndim else None


def _counts(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many are not left out, and how many of them are behind the first of each row."""
    counted = labels.ne(IGNORED)
    return counted.sum(), counted[..., 1:].sum()


def _first(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> object:
    return (change(result[0]), *result[1:]) if isinstance(result, tuple) else change(result)
