"""What a callback asks for on one rank (stop, save, evaluate, log), all ranks do: otherwise some would leave the common path.

A timer, an early stop on a local loss, a file that one rank sees: HF's Trainer acts on each process's own `control`. Under
DDP the others then wait in the next collective until the time-out.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis
from hf_dist.log import say, warn

__all__ = ["AgreedControlMixin"]

_FLAGS = {
    "should_training_stop": "stop training",
    "should_epoch_stop": "end the epoch",
    "should_save": "save",
    "should_evaluate": "evaluate",
    "should_log": "log",
}
_KNOWN = ("transformers.", "hf_dist.", "trl.", "peft.", "sentence_transformers.")
"""Packages whose callbacks and Trainers ask for the same thing on every rank."""


def _is_own(kind: type) -> bool:
    """Whether a class is the user's."""
    return not kind.__module__.startswith(_KNOWN) and kind.__module__ != "hf_dist"


class AgreedControlMixin:
    """Overrides of the Trainer around a step's callbacks; part of `DistTrainerMixin`.

    Only where there is a callback or a Trainer of the user's own, on any rank: one small all-reduce after each step, another
    one after a log, a save or an evaluation. Not with `local_sgd`, whose replicas do not meet at every step.
    """

    args: object
    state: Any
    control: Any
    accelerator: Any
    _asks_all = False

    def _learn_who_asks(self) -> None:
        """Before a training all ranks know whether any of them has callbacks of the user's own."""
        if self.dist is not None:  # type: ignore[attr-defined]
            axis = self.accelerator.mesh.control
            self._asks_all = axis.size > 1 and any(collectives.all_gather_object(axis, self._may_ask_alone()))

    def _may_ask_alone(self) -> bool:
        callbacks = self.callback_handler.callbacks  # type: ignore[attr-defined]
        return any(map(_is_own, [*map(type, callbacks), *type(self).__mro__[:-1]]))

    def add_callback(self, callback: object) -> None:
        """HF's. Ranks that did not ask each other so far cannot begin in the middle of a training: this rank says so."""
        super().add_callback(callback)  # type: ignore[misc]
        kind = callback if isinstance(callback, type) else type(callback)
        asks_nobody = getattr(self, "is_in_train", False) and self.dist is not None and not self._asks_all  # type: ignore[attr-defined]
        if asks_nobody and _is_own(kind) and self.accelerator.mesh.control.size > 1:
            warn(
                f"{kind.__name__} was added during the training: what it asks for (stop, save, evaluate, log), it must ask for "
                "on every rank. Added before train(), it may ask on one rank."
            )

    def _maybe_log_save_evaluate(self, *args: object, **kwargs: object) -> None:
        """HF's, on what any rank asks for, before it and after (a callback of an evaluation may stop the training)."""
        acts = self._agree_on_control()
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        if acts:
            self._agree_on_control()

    def _agree_on_control(self) -> bool:
        """Set what any rank has set, say who; whether anything is asked for. Collective over all ranks."""
        engine = self.dist_engine  # type: ignore[attr-defined]
        if not self._asks_all or engine is None or engine.replicas_here is not None:
            return False
        axis: MeshAxis = engine.mesh.control
        asked = [bool(getattr(self.control, flag)) for flag in _FLAGS]
        # The first rank that asks, and the first that does not, both counted from the end: one maximum tells both.
        words = torch.tensor([(axis.size - axis.rank) * (ask == wanted) for wanted in (True, False) for ask in asked])
        collectives.all_reduce(axis, words, op="max").wait()
        first, other = words.view(2, len(_FLAGS)).tolist()
        for (flag, what), asks, refuses in zip(_FLAGS.items(), first, other, strict=True):
            setattr(self.control, flag, bool(asks))
            if asks and refuses:
                say(f"rank {axis.size - asks} asked to {what} at step {self.state.global_step}, so all ranks do")
        return any(first)
