"""Trainings that are told to stop and are started again: what a rank does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_dist import DistTrainer, DistTrainingArguments
from tests.covering import FULL_GRID
from tests.hf.lifecycle import logged
from tests.hf.recipes import RECIPES

Moment = tuple[str, int]
"""Where in the run: "microbatch", "prediction" or "save", and the how manieth of them; or "start", 0."""


class Watched(DistTrainer):
    """Calls `act` when its moment has come."""

    moment: Moment = ("never", 0)
    act: Callable[[], None] = staticmethod(lambda: None)

    def _count(self, what: str) -> None:
        counts = self.__dict__.setdefault("counts", {})
        counts[what] = counts.get(what, 0) + 1
        if (what, counts[what]) == self.moment:
            self.act()

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """HF's, slowly."""
        if self.moment[0] == "save" and "save" not in self.__dict__.get("counts", {}):
            write = self.checkpoint_writer._write

            def slow(*arguments: Any) -> None:
                self._count("save")
                time.sleep(0.5)
                write(*arguments)

            self.checkpoint_writer._write = slow  # type: ignore[method-assign]
        return super()._save_checkpoint(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """HF's: before the first window, the signals are ours already."""
        self._count("window")
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """HF's."""
        self._count("microbatch")
        return super().training_step(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """HF's."""
        self._count("prediction")
        return super().prediction_step(*args, **kwargs)


def watched(folder: Path, async_save: bool = False, **changes: Any) -> Watched:
    """Eight steps of three microbatches in two epochs, an evaluation after every second; random numbers in model and data.

    Two batches per evaluation and rank. By default six steps.
    """
    config = {"zero_optimization": {"stage": 3}, "checkpoint": {"async_save": async_save}, **changes.pop("config", {})}
    changes = {"eval_strategy": "steps", "eval_steps": 2, **({} if FULL_GRID else {"max_steps": 6}), **changes}
    trainer: Watched = RECIPES["random_collator"].build(
        Watched, DistTrainingArguments, folder, 2, dist_config=config, **changes
    )
    trainer.eval_dataset = trainer.eval_dataset[:8]
    return trainer


def whole(folder: Path, **changes: Any) -> list[Any]:
    """The log of a run that nobody stops."""
    trainer = watched(folder, **changes)
    trainer.train()
    return everything(trainer)


def everything(trainer: Any) -> list[Any]:
    """What is logged of steps, and of evaluations."""
    evaluations = [(entry["step"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]
    return [logged(trainer), evaluations]


def told(folder: Path, moment: Moment, number: str, ranks: tuple[int, ...], **changes: Any) -> dict[str, Any]:
    """A run in which `ranks` get a signal at `moment`, and another that continues it, in one process."""
    rank = int(os.environ["RANK"])
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)]
    trainer = watched(folder, **changes)
    if rank in ranks:
        trainer.moment = moment
        trainer.act = lambda: os.kill(os.getpid(), getattr(signal, number))
    code, asked = stopped_with(trainer), trainer.__dict__["counts"].get("microbatch", 0)
    # The first rank to end makes a launcher send this to the others.
    os.kill(os.getpid(), signal.SIGTERM)
    left = sorted(path.name for path in folder.iterdir())
    again = watched(folder, **changes)
    begin: list[int] = []
    initial = type(again)._finalize_training

    def finalize(self: Any, *args: Any) -> Any:
        begin.append(self._first_step)
        return initial(self, *args)

    again._finalize_training = finalize.__get__(again)  # type: ignore[method-assign]
    again.train(resume_from_checkpoint="auto")
    for n, handler in zip((signal.SIGTERM, signal.SIGUSR1), handlers, strict=True):
        signal.signal(n, handler)
    return {"code": code, "microbatches": asked, "left": left, "resumed_at": begin[0], "logs": everything(again)}


def stopped_with(trainer: Any) -> Any:
    """The exit code that `train()` asks for; None if it ends."""
    try:
        trainer.train()
    except SystemExit as error:
        return error.code
    return None


def given_back(folder: Path) -> dict[str, Any]:
    """Who has the signals: during a run, after it, after one that raised, with the switch off, outside the main thread."""
    heard: list[Any] = []
    signal.signal(signal.SIGTERM, mine := lambda *_: None)

    def look() -> None:
        heard.append(signal.getsignal(signal.SIGTERM) is mine)

    def run(act: Callable[[], None] = look, **changes: Any) -> None:
        trainer = watched(folder, max_steps=1, eval_strategy="no", **changes)
        trainer.moment, trainer.act = ("microbatch", 2), act
        trainer.train()
        look()

    def fail() -> None:
        raise RuntimeError("on every rank")

    run()
    try:
        run(fail)
    except RuntimeError:
        look()
    run(config={"hf_dist": {"save_on_signal": False}})
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return {"heard": heard}
