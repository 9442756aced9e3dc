"""A Trainer whose callback asks for something, on one rank or on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tests.hf.loss_kinds import Net, rows

STEPS, AT = 6, 2
FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Asks(TrainerCallback):
    """Sets a flag after a step, or after the first evaluation, on some ranks."""

    def __init__(self, flag: str, event: str, here: bool) -> None:
        self.flag, self.event, self.here = flag, event, here
        self.seen: list[str] = []

    def _ask(self, event: str, state: Any, control: Any) -> None:
        if self.here and event == self.event and state.global_step == AT:
            setattr(control, self.flag, True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ask("step", state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(f"evaluated {state.global_step}")
        self._ask("evaluate", state, control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(f"saved {state.global_step}")

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if "loss" in state.log_history[-1]:
            self.seen.append(f"logged {state.global_step}")


def outcome(
    folder: Path, flag: str, event: str, ranks: tuple[int, ...], stage: int | None
) -> tuple[list[str], int, list[str]]:
    """(what happened, steps that were made, checkpoints); without a stage, the stock Trainer in one process."""
    import os

    from transformers import Trainer, TrainingArguments

    from hf_dist import DistTrainer, DistTrainingArguments

    ours = stage is not None
    more: dict[str, Any] = {"dist_config": {"zero_optimization": {"stage": stage}}} if ours else {}
    arguments: Any = DistTrainingArguments if ours else TrainingArguments
    args = arguments(
        str(folder), per_device_train_batch_size=1 if ours else 2, max_steps=STEPS, logging_strategy="no", save_strategy="no",
        eval_strategy="steps" if event == "evaluate" else "no", eval_steps=AT, report_to="none", use_cpu=True,
        disable_tqdm=True, learning_rate=0.01, **more,
    )  # fmt: skip
    # Only some ranks have the callback at all where it is a rank's own timer.
    here = not ours or int(os.environ["RANK"]) in ranks
    data = rows(frozenset())
    trainer: Any = (DistTrainer if ours else Trainer)(
        model=Net("counted"), args=args, train_dataset=data[:6], eval_dataset=data[6:10]
    )
    watching = Asks(flag, event, here)
    trainer.add_callback(watching)
    trainer.train()
    return watching.seen, trainer.state.global_step, sorted(path.name for path in folder.glob("checkpoint-*"))


def added_late(folder: Path) -> list[str]:
    """What a rank is told whose collator adds a callback while it trains; rank 0 adds none."""
    import logging
    import os

    from transformers import default_data_collator

    from hf_dist import DistTrainer, DistTrainingArguments

    said: list[str] = []
    late: list[Any] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                said.append(record.getMessage())

    def collate(batch: Any) -> Any:
        if os.environ["RANK"] == "1" and trainer.state.global_step >= AT and not late:
            late.append(Asks("should_log", "evaluate", False))
            trainer.add_callback(late[0])
        return default_data_collator(batch)

    args = DistTrainingArguments(
        str(folder), per_device_train_batch_size=1, max_steps=STEPS, save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, dist_config={"zero_optimization": {"stage": 1}},
    )  # fmt: skip
    trainer = DistTrainer(model=Net("counted"), args=args, train_dataset=rows(frozenset())[:6], data_collator=collate)
    handler = Lines()
    logging.getLogger("hf_dist").addHandler(handler)
    trainer.train()
    logging.getLogger("hf_dist").removeHandler(handler)
    return said
