"""Replicas that meet a server, in the Trainer: what a rank does, and what it reports."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from hf_dist import DistTrainer, DistTrainingArguments
from tests.hf.lifecycle import logged
from tests.hf.on_ranks import weights_of
from tests.hf.recipes import Recipe, Row, texts

SECTION = {
    "mode": "server",
    "every": 2,
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
    "nesterov": True,
    "dynamic_steps": False,
}
ROWS = texts(48)
RECIPE = Recipe(
    rows=lambda: ROWS,
    trainer={"eval_dataset": texts(48)[:10]},
    gradient_accumulation_steps=2,
    max_steps=6,
    optim="adamw_torch",
)


class Stream(IterableDataset[Row]):
    """The rows, without an index."""

    def __iter__(self) -> Iterator[Row]:
        """In their order."""
        return iter(ROWS)


class Watched(DistTrainer):
    """Notes which rows are trained on, and how many are evaluated."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """HF's."""
        self.__dict__.setdefault("seen", []).extend(tuple(row[mask.bool()].tolist()) for row, mask in _rows(inputs))
        return super().training_step(model, inputs, *args, **kwargs)


def _rows(inputs: Row) -> Any:
    return zip(inputs["input_ids"], inputs["attention_mask"], strict=True)


def train(
    rank: int, world: int, folder: str, replicas: int, layout: dict[str, Any], resume_at: int = 0, servers: int = 1,
    streams: bool = False, **changes: Any,
) -> dict[str, Any] | None:  # fmt: skip
    """A replica's training; None on the server."""
    trainer_role = {"ranks": "rest", "replicas": replicas}
    roles = {"server": {"ranks": servers, "averages": True}, "trainer": trainer_role}
    config = {**layout, "hf_dist": {"roles": roles}, "local_sgd": SECTION}
    recipe = copy.copy(RECIPE)
    if streams:
        recipe.trainer = {**RECIPE.trainer, "train_dataset": Stream()}
    options = {"logging_steps": 1, "save_strategy": "steps", "save_steps": 1, "dataloader_num_workers": 0, **changes}
    try:
        trainer: Any = recipe.build(Watched, DistTrainingArguments, Path(folder), 2, dist_config=config, **options)
    except SystemExit as end:
        assert not end.code, end
        return None
    made = _made_by_the_first(trainer, folder)
    checkpoint = str(Path(folder, f"checkpoint-{resume_at}")) if resume_at else None
    trainer.train(resume_from_checkpoint=checkpoint)
    outer = trainer.dist_engine.outer
    evaluated = trainer.evaluate()
    report = {
        "logs": logged(trainer),
        "seen": trainer.seen,
        "weights": weights_of(trainer),
        "sent": (outer.pushed_nbytes, outer.pulled_nbytes),
        "version": outer.version,
        "folder": trainer.args.output_dir,
        "saved": sorted(
            int(path.name.partition("-")[2]) for path in Path(trainer.args.output_dir).glob("checkpoint-*")
        ),
        "evaluated": evaluated["eval_loss"],
        "samples": len(trainer.get_eval_dataloader().dataset),
        "replica": trainer.accelerator.replica,
        "made": made,
    }
    outer.leave()
    return report


def _made_by_the_first(trainer: Any, folder: str) -> list[bool]:
    """Whether what the first process of this role on this machine makes is there for all, in HF's way and in accelerate's."""
    number, found = trainer.accelerator.replica[0], []
    ways = {
        "hf": (trainer.args.main_process_first(), trainer.args.local_process_index == 0),
        "accelerate": (trainer.accelerator.local_main_process_first(), trainer.accelerator.is_local_main_process),
    }
    for name, (waiting, is_first) in ways.items():
        made = Path(folder, f"{name}{number}")
        with waiting:
            if is_first:
                time.sleep(0.1)
                made.touch()
            found.append(made.exists())
    return found
