"""What a rank does in the tests of the Trainer over pipeline stages."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.hf.on_ranks import dist_trainer, record_of


def pipeline_of(stages: int, **more: Any) -> dict[str, Any]:
    """The section of the JSON."""
    return {"pipeline": {"stages": stages, **more}} if stages > 1 else {}


def train(folder: Path, recipe: str, stage: int, pp: int, **changes: Any) -> dict[str, Any]:
    """One recipe; weights of all stages, on the main rank."""
    trainer = dist_trainer(recipe, stage, folder, pipeline_of(pp), **changes)
    trainer.train()
    return record_of(trainer)


def precision(folder: Path, dtype: str, pp: int) -> dict[str, Any]:
    """In half precision, with the same rounding whatever the number of stages.

    Not a tied model: one process adds the two gradients of its embedding in half precision, stages add them in fp32.
    """
    trainer = dist_trainer("classifier", 1, folder, {**pipeline_of(pp), dtype: {"enabled": True}}, max_steps=4)
    trainer.train()
    return record_of(trainer)


def one_after_the_other(folder: Path) -> bool:
    """`main_process_first` with one data rank: the second stage must see what the first process wrote."""
    trainer = dist_trainer("plain", 1, folder, pipeline_of(2))
    note = folder / "note"
    with trainer.args.main_process_first():
        if trainer.args.process_index == 0:
            time.sleep(0.5)
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text("done")
        return note.exists() and trainer.args.world_size == 1


def dropout(folder: Path) -> list[float]:
    """With dropout and a collator that draws: the stages must go on reading the same batches."""
    trainer = dist_trainer("random_collator", 1, folder, pipeline_of(2), max_steps=4)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def other_data(rank: int, world: int, folder: str) -> None:
    """A collator that knows the rank: the stages read different batches."""
    from tests.hf.recipes import pad

    def collate(rows: Any) -> Any:
        batch = pad(rows)
        batch["input_ids"] = batch["input_ids"].roll(trainer.args.process_index, dims=1)
        return batch

    trainer = dist_trainer("plain", 1, Path(folder), pipeline_of(2), max_steps=4)
    trainer.data_collator = collate
    trainer.train()


def generate(folder: Path, stage: int) -> dict[str, Any]:
    """Greedy, with a cache, before and after two steps; and what `model.state_dict()` says."""
    trainer = dist_trainer("plain", stage, folder, pipeline_of(2), max_steps=2)
    trainer.train()
    prompt = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    trainer.model.eval()
    with torch.no_grad():
        tokens = trainer.model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
        logits = trainer.model(input_ids=prompt).logits
    try:
        trainer.model.state_dict()
        said = ""
    except Exception as error:
        said = str(error)
    try:
        trainer.model(input_ids=prompt)
        graph = ""
    except Exception as error:
        graph = str(error)
    trainer.save_model(str(folder / "model"))
    return {"tokens": tokens, "logits": logits, "state_dict": said, "gradients": graph, "folder": str(folder / "model")}


def seq2seq(folder: Path, pp: int) -> dict[str, Any]:
    """A tiny T5 with `predict_with_generate`."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from hf_dist import DistTrainerMixin
    from hf_dist.hf.args import DistArgsMixin
    from tests.hf.recipes import plain_arguments

    arguments_class: Any = Seq2SeqTrainingArguments
    if pp:
        arguments_class = dataclass(type("Arguments", (DistArgsMixin, Seq2SeqTrainingArguments), {}))
    trainer_class: Any = type("Trainer", (DistTrainerMixin, Seq2SeqTrainer), {}) if pp else Seq2SeqTrainer
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(d_model=32, d_kv=8, d_ff=56, num_layers=2, num_heads=4, vocab_size=60, dropout_rate=0.0,
                 decoder_start_token_id=0)
    )  # fmt: skip
    g = torch.Generator().manual_seed(2)
    rows = [{"input_ids": torch.randint(2, 60, (8,), generator=g), "labels": torch.randint(2, 60, (5,), generator=g)}
            for _ in range(12)]  # fmt: skip
    found: dict[str, Any] = {}

    def metrics(prediction: Any) -> dict[str, float]:
        found["tokens"] = torch.as_tensor(prediction.predictions)
        return {"rows": float(len(prediction.predictions))}

    more = {"dist_config": {"zero_optimization": {"stage": 1}, **pipeline_of(pp)}} if pp else {}
    trainer = trainer_class(
        model=model,
        args=arguments_class(
            **plain_arguments(folder, 2, max_steps=3, predict_with_generate=True, generation_max_length=7, **more)
        ),
        train_dataset=rows,
        eval_dataset=rows[:4],  # whole batches: HF counts a short last one like a full one here
        compute_metrics=metrics,
    )
    if not pp:  # HF believes that T5 divides by num_items_in_batch, and does not average over the window itself
        trainer.model_accepts_loss_kwargs = False
    trainer.train()
    values = trainer.evaluate()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "eval": {k: values[k] for k in ("eval_loss", "eval_rows")}, "tokens": found["tokens"]}


def resumed(folder: Path, saved_by: str, pp: int, stage: int, accumulation: int) -> dict[str, Any]:
    """Train on from the checkpoint of another layout."""
    config = pipeline_of(pp)
    trainer = dist_trainer("even", stage, folder, config, gradient_accumulation_steps=accumulation)
    trainer.train(resume_from_checkpoint=saved_by)
    return record_of(trainer)


def saved(folder: Path, pp: int, stage: int, accumulation: int) -> dict[str, Any]:
    """A whole run that saves in the middle of an epoch."""
    more = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": accumulation}
    trainer = dist_trainer("even", stage, folder, pipeline_of(pp), **more)
    trainer.train()
    return {**record_of(trainer), "checkpoint": str(folder / "checkpoint-3")}
