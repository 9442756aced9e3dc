"""Decides when a model's loss runs in tiles: hooks on the model and its head, and full logits for user code that reads them.

No part of the model is replaced. A hook marks the hidden states that enter the head (`lazy_logits.py`). The model's forward,
loss function, shift and normalisation run unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_dist.config import DistConfig, settled
from hf_dist.errors import ModelError
from hf_dist.log import say_once
from hf_dist.memory.loss.lazy_logits import LazyLogits, Use, marked
from hf_dist.memory.loss.vocabulary import VocabularySplit

Taker = Callable[[LazyLogits], torch.Tensor]
"""Makes a loss, 0D, of logits that are not computed."""


class TiledLoss:
    """The loss of one model, in chunks of its logits or in tiles without materialised logits.

    If they save memory, tiles are used while the model trains or while only the loss of an evaluation is read. Logits that no
    loss inside the model's forward has consumed are computed at its end. If other code reads deferred logits, they are computed
    then, and later forwards defer nothing. With chunks, the logits are always available.
    """

    def __init__(
        self,
        model: nn.Module,
        head: nn.Module,
        *,
        tiles: bool = True,
        can_defer: bool = True,
        split: VocabularySplit | None = None,
    ) -> None:
        """Hook `model` and its `head`, the module that turns hidden states into logits.

        `tiles`: the product is deferred where that saves memory; `can_defer`: the head's weight can be read at the end of the
        model's forward; `split`: the split of the vocabulary, if the head has some of its rows.
        """
        self.tiles = tiles
        """Whether products may be deferred; False once other code has read deferred logits."""
        self._can_defer = can_defer
        self._taker: Taker | None = None
        self._split = split
        self._name = type(model).__name__
        self._evaluates = False
        self._use: Use | None = None
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        # Runs before the hook that frees the head's weights.
        model.register_forward_hook(self._leave, prepend=True, always_call=True)
        head.register_forward_pre_hook(self._mark)
        _losses[model] = self

    @contextmanager
    def taken_by(self, taker: Taker) -> Iterator[None]:
        """Inside the block, a forward's logits are not computed: `taker(logits)` makes the loss of them, `loss` of the output.

        Raises `ModelError` if the head's weight cannot be read at the end of the forward.
        """
        if not self._can_defer:
            raise ModelError(
                f"the head of {self._name} is a unit of its own (leaf_module), so no loss can be made of its input"
            )
        self._taker = taker
        try:
            yield
        finally:
            self._taker = None

    @contextmanager
    def only_loss_is_read(self) -> Iterator[None]:
        """Use tiles inside the block for forwards without gradient too."""
        before, self._evaluates = self._evaluates, True
        try:
            yield
        finally:
            self._evaluates = before

    def _enter(self, model: nn.Module, args: object, kwargs: dict[str, object]) -> None:
        if torch.compiler.is_compiling():  # the compiler fuses the loss itself
            return
        learns = model.training and torch.is_grad_enabled()
        if self._taker is not None:
            split = self._split if self._split is not None and self._split.is_cut() else None
            self._use = Use(self._was_read, always=True, split=split)
        elif learns or self._evaluates or kwargs.get("labels") is not None:
            split = self._split if self._split is not None and self._split.is_cut() else None
            self._use = Use(self._was_read, tiles=self.tiles and (learns or self._evaluates), split=split)

    def _mark(self, head: nn.Module, args: tuple[object, ...]) -> tuple[object, ...] | None:
        if (
            self._use is None or not args or type(args[0]) is not torch.Tensor
        ):  # a subclass (fake, DTensor) stays itself
            return None
        return (marked(args[0], self._use), *args[1:])

    def _leave(self, model: nn.Module, args: object, output: object) -> object:
        use, self._use = self._use, None
        if use is None:
            return None
        lazy = [v for v in tree_leaves(output) if isinstance(v, LazyLogits)]
        if self._taker is not None and lazy and isinstance(output, dict):
            output["loss"], output["logits"] = self._taker(lazy[0]), None
        if use.has_loss:
            if not torch.is_grad_enabled():  # no backward follows, so the weights may be freed now
                use.end()
            return _with_full_logits(output, lambda v: v.is_plain) if lazy else None
        if torch.is_grad_enabled() and any(v.put_off for v in lazy):
            say_once(
                f"hf_dist.tiled_loss has no effect if the loss is not computed in the forward of {self._name} (no labels "
                "given, label smoothing, a custom loss function): the logits are then computed in full"
            )
        return _with_full_logits(output, lambda v: True) if lazy else None

    def _was_read(self, function: str) -> None:
        self.tiles = False
        say_once(
            f"hf_dist.tiled_loss: {function} reads the logits of {self._name}, so they are computed in full from now on"
        )


def _with_full_logits(output: object, which: Callable[[LazyLogits], bool]) -> object:
    """`output` with plain tensors for the lazy logits selected by `which`; changes ModelOutput and dicts in place."""

    def plain(value: object) -> object:
        return value.full() if isinstance(value, LazyLogits) and which(value) else value

    if isinstance(output, tuple):
        return tuple(plain(value) for value in output)
    if isinstance(output, torch.Tensor):
        return plain(output)
    if isinstance(output, dict):
        for key, value in list(output.items()):
            if isinstance(value, LazyLogits):
                output[key] = plain(value)
        return output
    for key, value in list(getattr(output, "__dict__", {}).items()):
        if isinstance(value, LazyLogits):
            setattr(output, key, plain(value))
    return output


def tiled_loss_for(
    model: nn.Module, kept: set[nn.Module], config: DistConfig, split: VocabularySplit | None = None
) -> TiledLoss | None:
    """Make the loss of `model` run in chunks or tiles; None if that is impossible or not wanted. Local.

    `kept`: modules whose weights are readable from start to end of the model's forward (tiles run after the head's own
    forward). `split`: the split of the vocabulary, if the head has some of its rows.
    """
    wanted = settled(config.hf_dist.tiled_loss)
    if wanted is False:
        return None
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    name = type(model).__name__
    if not isinstance(head, nn.Module):
        if config.source_of("hf_dist.tiled_loss") == "file":
            say_once(f"hf_dist.tiled_loss has no effect: {name} has no head over a vocabulary (get_output_embeddings)")
        return None
    if split is not None and any(True for _ in head.children()):
        return None  # an adapter on the head: its product is added to the logits
    tiles = any(module in kept for module in head.modules())
    if wanted and not tiles:
        say_once(f"hf_dist.tiled_loss has no effect: the head of {name} is a unit of its own (leaf_module)")
    return TiledLoss(model, head, tiles=bool(wanted) and tiles, can_defer=tiles, split=split)


_losses: weakref.WeakKeyDictionary[nn.Module, TiledLoss] = weakref.WeakKeyDictionary()


def tiled_loss_of(model: nn.Module) -> TiledLoss | None:
    """The loss of a model that was prepared; None without one. Local."""
    return _losses.get(model)
