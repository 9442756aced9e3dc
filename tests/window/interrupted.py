"""Trainings that are interrupted in the middle of a window and begun again, as a notebook does: what a rank does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from tests.hf.on_ranks import dist_trainer, record_of


class Interrupt(TrainerCallback):
    """Raises once, after some microbatches of the second window."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.done = False

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 and not self.done:
            self.done = True
            raise self.error


class FailInForward:
    """Hook of a model: raises once, in the second microbatch of the second window."""

    def __init__(self, error: type[BaseException], trainer: Trainer) -> None:
        self.error = error
        self.trainer = trainer
        self.left = 2

    def __call__(self, *args: Any) -> None:
        self.left -= self.trainer.state.global_step == 1
        if self.left == 0:
            self.left = -1
            raise self.error


ERRORS: dict[str, type[BaseException]] = {"failure": RuntimeError, "ctrl_c": KeyboardInterrupt}


def interrupted(trainer: Trainer, error: str, where: str) -> None:
    """`train()` twice, the first one interrupted."""
    if where == "substep":
        trainer.add_callback(Interrupt(ERRORS[error]))
    else:
        trainer.model.model.layers[1].register_forward_pre_hook(FailInForward(ERRORS[error], trainer))
    try:
        trainer.train()
    except ERRORS[error]:
        pass
    else:
        raise AssertionError("was not interrupted")
    trainer.train()


def job(folder: Path, stage: int, config: dict[str, Any], error: str, where: str) -> dict[str, Any]:
    """One run of ours."""
    trainer = dist_trainer("plain", stage, folder, config, max_steps=4)
    interrupted(trainer, error, where)
    return record_of(trainer)
