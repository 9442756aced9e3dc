"""The start-up report in the log of a Trainer run."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging as hf_logging

from hf_dist import log
from hf_dist.engine.engine import Engine
from hf_dist.engine.report import report_of


class StartUpCallback(TrainerCallback):
    """Shows the report where HF announces the training, if the program's log level hid it when the engine was created.

    The engine's logger prints at INFO unless the program set up logging for warnings only. Scripts in HF's style do that
    and raise transformers to INFO, so the report then goes through transformers' logger. Once per engine, on rank 0.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)  # the trainer holds its callbacks
        self._shown: weakref.ref[Engine] | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Runs just after the engine was created."""
        trainer = self._trainer()
        engine = None if trainer is None else trainer.dist_engine
        if engine is None or (self._shown is not None and self._shown() is engine):
            return
        self._shown = weakref.ref(engine)
        if log.is_speaking_rank() and not log.logger.isEnabledFor(logging.INFO):
            report = report_of(engine)
            hf_logging.get_logger("transformers.hf_dist").info(report)
