"""What a rank does in the tests of the Trainer over pipeline stages only: half precision, encoder-decoders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.hf.layout_jobs import stages
from tests.hf.on_ranks import dist_trainer, record_of


def precision(folder: Path, dtype: str, pp: int) -> dict[str, Any]:
    """In half precision, with the same rounding whatever the number of stages.

    Not a tied model: one process adds the two gradients of its embedding in half precision, stages add them in fp32.
    """
    trainer = dist_trainer("classifier", 1, folder, {**stages(pp), dtype: {"enabled": True}}, max_steps=4)
    trainer.train()
    return record_of(trainer)


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

    more = {"dist_config": {"zero_optimization": {"stage": 1}, **stages(pp)}} if pp else {}
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
