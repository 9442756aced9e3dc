"""Trainers in mixed layouts that are killed at a random moment of a save, and resumed: what a rank does."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

from tests.covering import FULL_GRID
from tests.hf.layout_jobs import matrices, sequences, stages
from tests.hf.on_ranks import record_of

STEPS, WORLD = (5, 4) if FULL_GRID else (4, 2)
OFFLOAD = {"zero_optimization": {"stage": 3, "mics_shard_size": 2, "offload_optimizer": {"device": "cpu"}}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "stages, in the background": (1, {**stages(2), "checkpoint": {"async_save": True}}),
    "matrices": (3, matrices(2)),
    "sequences": (2, sequences(2)),
    "stages of matrices": (1, {**stages(2), **matrices(2)}),
    "copies of shards, offloaded, in the background": (3, {**OFFLOAD, "checkpoint": {"async_save": True}}),
}
"""Name -> ZeRO stage and the other keys."""


def trainer_of(folder: str, layout: str, base: Any = None, saves: str = "steps") -> Any:
    """A few steps, a checkpoint after each, two kept."""
    from hf_dist import DistTrainer, DistTrainingArguments
    from tests.hf.recipes import RECIPES

    stage, keys = LAYOUTS[layout]
    return RECIPES["even"].build(
        base or DistTrainer, DistTrainingArguments, Path(folder), 2, gradient_accumulation_steps=2, max_steps=STEPS,
        save_strategy=saves, save_steps=1, save_total_limit=2, dist_config={"zero_optimization": {"stage": stage}, **keys},
    )  # fmt: skip


def until_killed(rank: int, world: int, folder: str, layout: str, seed: int) -> None:
    """One rank is killed at a random moment of a random save, or shortly after it."""
    from hf_dist import DistTrainer

    chance = random.Random(seed)
    victim, doomed, fraction = chance.randrange(world), chance.randrange(3, STEPS), 1.2 * chance.random()

    class Doomed(DistTrainer):
        seconds = 0.1

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            if rank == victim and self.state.global_step == doomed:
                threading.Timer(fraction * self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            began = time.perf_counter()
            super()._save_checkpoint(*args, **kwargs)
            self.seconds = max(time.perf_counter() - began, 0.05)

    trainer_of(folder, layout, Doomed).train()


Record = dict[str, Any]


def whole_and_resumed(
    rank: int, world: int, whole: str, folders: list[str], layout: str
) -> tuple[Record, list[tuple[int, Record]]]:
    """All steps without a break; for each folder, the step after which "auto" goes on, and what the run has made of it."""
    trainer = trainer_of(whole, layout, saves="no")
    trainer.train()
    expected, found = record_of(trainer), []
    for folder in folders:
        trainer = trainer_of(folder, layout)
        trainer.train(resume_from_checkpoint="auto")
        found.append((trainer._first_step, record_of(trainer)))
    return expected, found
