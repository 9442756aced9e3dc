"""When a model's loss runs in tiles: hooks on the model and its head, and what the user's code wants to see.

Nothing of the model is replaced. A hook marks the hidden states that enter the head (`lazy_logits.py`); the model's forward,
its loss function, shift and normalisation run as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_dist.activation.lazy_logits import Hidden, LazyLogits, Use
from hf_dist.config import DistConfig, settled
from hf_dist.log import say_once


class TiledLoss:
    """The tiled loss of one model: on while it trains, or while only the loss of an evaluation is read.

    Logits that no loss inside the model's forward has taken are computed at its end, as always. Logits that other code reads
    beside the loss are computed then, and from the next forward on the model runs as it would without this.
    """

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        """Hook `model` and its `head`, the module that turns hidden states into logits."""
        self.enabled = True
        """False from the moment that other code has read logits."""
        self._name = type(model).__name__
        self._evaluates = False
        self._use: Use | None = None
        model.register_forward_pre_hook(self._enter)
        # Before the hook that lets go of the head's weights.
        model.register_forward_hook(self._leave, prepend=True, always_call=True)
        head.register_forward_pre_hook(self._mark)

    @contextmanager
    def only_loss_is_read(self) -> Iterator[None]:
        """Inside, forwards without gradient are tiled too."""
        before, self._evaluates = self._evaluates, True
        try:
            yield
        finally:
            self._evaluates = before

    def _enter(self, model: nn.Module, args: Any) -> None:
        learns = model.training and torch.is_grad_enabled()
        self._use = Use(self._was_read) if self.enabled and (learns or self._evaluates) else None

    def _mark(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._use is None or not args or not isinstance(args[0], torch.Tensor):
            return None
        return (Hidden.of(args[0], self._use), *args[1:])

    def _leave(self, model: nn.Module, args: Any, output: Any) -> Any:
        use, self._use = self._use, None
        if use is None:
            return None
        if use.has_loss:
            if not torch.is_grad_enabled():  # no backward: the weights go now
                use.end()
            return None
        if torch.is_grad_enabled() and any(isinstance(v, LazyLogits) for v in tree_leaves(output)):
            say_once(
                f"hf_dist.tiled_loss has no effect where the loss is not computed in the forward of {self._name} (no labels "
                "given, label smoothing, a loss function of one's own): there the logits are computed in full"
            )
        return _with_full_logits(output)

    def _was_read(self, function: str) -> None:
        self.enabled = False
        say_once(
            f"hf_dist.tiled_loss: {function} reads the logits of {self._name}, so they are computed in full from now on"
        )


def _with_full_logits(output: Any) -> Any:
    """`output`, in which no logits are lazy; ModelOutput and dicts are changed in place."""
    if isinstance(output, LazyLogits):
        return output.full()
    if isinstance(output, dict):
        for key, value in list(output.items()):
            if isinstance(value, LazyLogits):
                output[key] = value.full()
        return output
    if isinstance(output, tuple):
        return tuple(v.full() if isinstance(v, LazyLogits) else v for v in output)
    for key, value in list(getattr(output, "__dict__", {}).items()):
        if isinstance(value, LazyLogits):
            setattr(output, key, value.full())
    return output


def tiled_loss_for(model: nn.Module, kept: set[nn.Module], config: DistConfig) -> TiledLoss | None:
    """The tiled loss of `model`, None where it cannot be or is not wanted.

    `kept`: modules whose weights can be read from the start of the model's forward to its
    end (the tiles run after the head's own forward).
    """
    if not settled(config.hf_dist.tiled_loss):
        return None
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    name = type(model).__name__
    if not isinstance(head, nn.Module):
        if config.source_of("hf_dist.tiled_loss") == "file":
            say_once(f"hf_dist.tiled_loss has no effect: {name} has no head over a vocabulary (get_output_embeddings)")
        return None
    if not any(module in kept for module in head.modules()):
        say_once(f"hf_dist.tiled_loss has no effect: the head of {name} is a unit of its own (leaf_module)")
        return None
    return TiledLoss(model, head)
