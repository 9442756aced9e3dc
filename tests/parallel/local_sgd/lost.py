"""A training of two replicas of two ranks, one of which is lost: what a rank does, for `tests/workers/launcher.py`.

Each log line goes to FOLDER/log.jsonl with the number of ranks.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

EVERY, STEPS, LOST_AT = 2, 8, 5
"""The replica is lost after a step that is no meeting."""
REPLICAS = {"zero_optimization": {"stage": 3, "mics_shard_size": 2}, "local_sgd": {"every": EVERY, "outer_lr": 0.9}}
GLOBAL_BATCH = 8


def train(folder: str, config: dict[str, Any]) -> None:
    """With the HF Trainer; a checkpoint is asked for after each step, and resumed from by itself."""
    from transformers import TrainerCallback

    from hf_dist import DistTrainer, DistTrainingArguments
    from tests.hf.recipes import make_model, pad, plain_arguments, texts

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    class Events(TrainerCallback):
        """Notes what is logged; every rank of the second replica is killed, as with its machine."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            """Rank 0 writes."""
            if rank == 0 and "loss" in logs:
                with Path(folder, "log.jsonl").open("a") as file:
                    file.write(json.dumps([state.global_step, logs["loss"], logs["grad_norm"], world]) + "\n")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Without a word."""
            if state.global_step == LOST_AT and world == 4 and rank >= 2:
                os.kill(os.getpid(), signal.SIGKILL)

    accumulation = GLOBAL_BATCH // (2 * world)
    changes: dict[str, Any] = dict(max_steps=STEPS, logging_steps=1, save_strategy="steps", save_steps=1)
    arguments = DistTrainingArguments(
        **plain_arguments(folder, 2, gradient_accumulation_steps=accumulation, dist_config=config) | changes
    )
    trainer = DistTrainer(make_model(), arguments, train_dataset=texts(48), data_collator=pad, callbacks=[Events()])
    trainer.train(resume_from_checkpoint="auto")


CASES = {"replicas": lambda folder: train(folder, REPLICAS), "alone": lambda folder: train(folder, {})}
