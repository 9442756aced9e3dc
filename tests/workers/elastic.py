"""A training under a real launcher that is stopped or killed, and goes on by itself: `torchrun ... elastic.py FOLDER CASE`.

Each log line goes to FOLDER/log.jsonl with the number of ranks and the launcher's count of restarts.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2])
GLOBAL_BATCH = 12
AT, LAST = 3, 6
"""The step after which something happens, in the first epoch of four steps, and the last one."""


def happen(case: str, folder: Path) -> None:
    """The event of `case`, at its rank, once per folder."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    here = "VICTIM" in os.environ if case == "node" else rank == world - 1
    if case == "nothing" or not here or (folder / "happened").exists():
        return
    (folder / "happened").write_text(case)
    if case == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case == "told":
        os.kill(os.getpid(), signal.SIGTERM)
    elif case == "launcher":
        os.kill(os.getppid(), signal.SIGTERM)
    elif case == "interrupted":
        os.kill(os.getppid(), signal.SIGINT)
    elif case == "job":  # as a scheduler does: every process of the job, and the launcher passes its own on
        loading = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
        assert loading
        for process in [*loading, os.getpid(), os.getppid()]:
            os.kill(process, signal.SIGTERM)
    elif case == "node":
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, case: str) -> None:
    """Six steps of twelve samples, a checkpoint after each."""
    from transformers import TrainerCallback

    from hf_dist import DistTrainer, DistTrainingArguments
    from tests.hf.recipes import make_model, pad, plain_arguments, texts

    world = int(os.environ["WORLD_SIZE"])

    class Events(TrainerCallback):
        """Notes what is logged, and lets things happen."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            """Rank 0 writes."""
            if state.is_world_process_zero and "loss" in logs:
                start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
                entry = [state.global_step, logs["loss"], logs["grad_norm"], logs["learning_rate"], world, start]
                with open(folder / "log.jsonl", "a") as file:
                    file.write(json.dumps(entry) + "\n")

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Before the checkpoint of step `AT` is written."""
            if state.global_step == AT:
                happen(case, folder)
            if case in ("launcher", "interrupted", "job"):
                time.sleep(0.4)  # the launcher looks every tenth of a second

    changes: dict[str, Any] = dict(gradient_accumulation_steps=GLOBAL_BATCH // (2 * world))
    changes["dataloader_num_workers"] = int(case == "job")
    arguments = DistTrainingArguments(
        **plain_arguments(folder, 2, save_strategy="steps", save_steps=1, save_total_limit=2, max_steps=LAST)
        | {**changes, "dist_config": {"zero_optimization": {"stage": 3}}}
    )
    trainer = DistTrainer(make_model(), arguments, train_dataset=texts(48), data_collator=pad, callbacks=[Events()])
    trainer.train(resume_from_checkpoint="auto")


if __name__ == "__main__":
    sys.path.insert(0, ROOT)
    main(Path(sys.argv[1]), sys.argv[2])
