"""What a rank does in the tests of the Trainer under a layout: keys that split stages, matrices or sequences."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hf_dist.hf.callbacks import throughput
from tests.covering import FULL_GRID
from tests.hf.on_ranks import dist_trainer, record_of, stock_record, totals
from tests.hf.recipes import RECIPES, Recipe, texts
from tests.references import shared

PROMPTS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
DECODING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 0},
    "static": {"do_sample": False, "cache_implementation": "static"},
}
"""Ways to generate. Stages have no cache of a fixed size."""
SAVED_AT, LAST, ROWS = (6, 10, 48) if FULL_GRID else (3, 5, 24)
"""Of the runs that are resumed: steps, and rows; a save in the middle of an epoch, the end in the middle of the next one."""


def stages(count: int, **more: Any) -> dict[str, Any]:
    """A pipeline."""
    return {"pipeline": {"stages": count, **more}} if count > 1 else {}


def matrices(parts: int) -> dict[str, Any]:
    """Split matrices."""
    return {"tensor_parallel": {"autotp_size": parts}}


def sequences(parts: int, exchange: str = "auto", **more: Any) -> dict[str, Any]:
    """Split sequences."""
    return {"sequence_parallel_size": parts, "hf_dist": {"sequence_parallel": exchange}, **more} if parts > 1 else more


def train(
    folder: Path, recipe: str, stage: int, layout: dict[str, Any], rows: int | None = None, **changes: Any
) -> dict[str, Any]:
    """One recipe; whole weights on the main rank, and what the Trainer counted. `rows`: so many of the recipe's."""
    trainer = dist_trainer(recipe, stage, folder, layout, **changes)
    trainer.train_dataset = trainer.train_dataset[:rows]
    trainer.train()
    return {**record_of(trainer), **totals(trainer)}


def stock(recipe: str, data_ranks: int, rows: int | None = None, **changes: Any) -> dict[str, Any]:
    """`train` of the stock Trainer in one process; once per test run."""
    if rows is None:
        return stock_record(recipe, data_ranks, **changes)

    def run() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            trainer = RECIPES[recipe].in_one_process(folder, data_ranks, **changes)
            trainer.train_dataset = trainer.train_dataset[:rows]
            trainer.train()
            return {**record_of(trainer), **totals(trainer)}

    return shared(("stock Trainer", recipe, data_ranks, rows, sorted(changes.items())), run)


def saved(folder: Path, stage: int, layout: dict[str, Any], accumulation: int) -> dict[str, Any]:
    """A whole run with a checkpoint on its way."""
    more = {
        "max_steps": LAST,
        "save_strategy": "steps",
        "save_steps": SAVED_AT,
        "gradient_accumulation_steps": accumulation,
    }
    return {**train(folder, "even", stage, layout, ROWS, **more), "checkpoint": str(folder / f"checkpoint-{SAVED_AT}")}


def resumed(folder: Path, saved_by: str, stage: int, layout: dict[str, Any], accumulation: int) -> dict[str, Any]:
    """Train on from the checkpoint of another layout."""
    trainer = dist_trainer("even", stage, folder, layout, max_steps=LAST, gradient_accumulation_steps=accumulation)
    trainer.train_dataset = trainer.train_dataset[:ROWS]
    trainer.train(resume_from_checkpoint=saved_by)
    return record_of(trainer)


def dropout(folder: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """With dropout and a collator that draws: the ranks that share rows must go on reading the same ones."""
    trainer = dist_trainer("random_collator", 1, folder, layout, max_steps=4)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = {"losses": losses, "next": float(torch.rand(()))}
    engine = trainer.accelerator.engine
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    window = [next(iter(trainer.get_train_dataloader()))] * engine.batch.accumulation
    return found | {"same batch": [float(engine.train_batch(iter(window))) for _ in range(2)]}


class OneSecond:
    """A clock by which a log window lasts one second."""

    def mark(self, phase: str) -> None:
        """Nothing to add up."""

    def read(self) -> dict[str, float]:
        """All in one phase."""
        return {"forward_backward": 1.0}

    def tell(self, step: int, seconds: dict[str, float]) -> None:
        """No watchdog listens."""


def counted(folder: Path) -> tuple[float, float]:
    """Rows and tokens that are logged as those of a second: four microbatches of two rows of 8 tokens, two stages per rank."""
    from hf_dist import DistTrainer, DistTrainingArguments

    layout = stages(2, virtual_stages=2, schedule="interleaved_1f1b")
    recipe = Recipe("deep", lambda: texts(ragged=False), max_steps=2, logging_steps=2, gradient_accumulation_steps=2)
    trainer = recipe.build(DistTrainer, DistTrainingArguments, folder, 2, dist_config=layout)
    with mock.patch.object(throughput, "start_clock", lambda device: OneSecond()):
        trainer.train()
    (log,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    return log["samples_per_second"], log["tokens_per_second_per_rank"]


def other_data(rank: int, world: int, folder: str, layout: dict[str, Any]) -> None:
    """A collator that knows the process: the ranks read different batches."""
    from tests.hf.recipes import pad

    def collate(rows: Any) -> Any:
        batch = pad(rows)
        batch["input_ids"] = batch["input_ids"].roll(rank, dims=1)
        return batch

    trainer = dist_trainer("plain", 1, Path(folder), layout, max_steps=4)
    trainer.data_collator = collate
    trainer.train()


def generate(folder: Path, stage: int, layout: dict[str, Any], how: list[str]) -> dict[str, Any]:
    """After two steps: tokens by each way of `DECODING` in `how`, logits, the folder of the model; what is said of a part."""
    trainer = dist_trainer("plain", stage, folder, layout, max_steps=2)
    trainer.train()
    trainer.model.eval()
    found: dict[str, Any] = {"num_parameters": trainer.model.num_parameters(), "folder": str(folder / "model")}
    with torch.no_grad():
        for name in how:
            found[name] = decoded(trainer.model, name)
        found["logits"] = trainer.model(input_ids=PROMPTS).logits + 0
    found["state_dict"] = said_by(trainer.model.state_dict)
    found["gradients"] = said_by(lambda: trainer.model(input_ids=PROMPTS))
    trainer.save_model(found["folder"])
    return found


def decoded(model: Any, how: str) -> torch.Tensor:
    """Six tokens after each prompt; the same random numbers on every call."""
    torch.manual_seed(3)
    tokens: torch.Tensor = model.generate(PROMPTS, max_new_tokens=6, pad_token_id=0, **DECODING[how])
    return tokens


def said_by(call: Any) -> str:
    """The error of a call; empty if there is none."""
    try:
        call()
    except Exception as error:
        return str(error)
    return ""


def one_after_the_other(folder: Path, layout: dict[str, Any]) -> bool:
    """`main_process_first` with one data rank: the second rank must see what the first process wrote."""
    trainer = dist_trainer("plain", 1, folder, layout)
    note = folder / "note"
    with trainer.args.main_process_first():
        if trainer.args.process_index == 0:
            time.sleep(0.5)
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text("done")
        return note.exists() and trainer.args.world_size == 1
