"""One training of a check by the Trainer: rows in their order, what is logged, a look at the weights after each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_dist.engine.engine import Engine
from hf_dist.errors import ModelError
from hf_dist.hf.args import DistTrainingArguments
from hf_dist.hf.trainer import DistTrainer
from hf_dist.model_config import field, text_config
from hf_dist.tools.check.data import Batch, joined
from hf_dist.tools.check.eights import multiply_in_float8
from hf_dist.tools.check.encoded import Counts, Messages, counts_of
from hf_dist.tools.check.job import Job
from hf_dist.tools.check.outputs import Outputs, few_rows, predicted
from hf_dist.tools.check.rounding import in_another_order, in_parts, moved

__all__ = ["Look", "Training", "alone_config", "checkpoint_of", "clip", "one_row_more", "rows_of", "whole_step"]


Look = Callable[[int, nn.Module, Engine | None], None]


@dataclass
class Training:
    """Some steps of a job's rows. Every rank of a layout makes one and calls it; the stock Trainer runs in one process."""

    job: Job
    steps: int
    config: dict[str, Any] | None = None
    """A layout, or None for the stock Trainer in fp32 with all rows of a step in one batch."""
    look: Look = lambda step, model, engine: None
    """Called on every rank after each step."""
    save_at: int = 0
    """The step after which a checkpoint is written; 0 for none."""
    evaluates: bool = True
    """Whether the rows of `one_row_more` are evaluated and predicted at the end."""
    names: Mapping[str, bool] | None = None
    """Those of the model's outputs, which a process tells that has the whole model."""
    draw: int = 0
    """If not 0, the number of another draw of the run's rounding (`rounding.py`)."""
    imitates: bool = True
    """Whether one process encodes messages and multiplies in float8 as the layout does; else it trains as if nothing did."""

    def __call__(self, folder: str, resume: str = "") -> dict[str, Any]:
        """Train from the start or from a checkpoint: `losses` and `norms` of its steps, how many were `skipped`, and at the
        end the loss of an `evaluation` (NaN if HF computes none, as for a forward whose signature names no labels) and the
        `outputs` of a prediction, with why some were `refused`."""
        model = self.job.make_model()
        if self.draw:
            moved(model, self.draw)
        if self.config is None and self.job.eights and self.imitates:
            multiply_in_float8(model, self.job.alone)
        optimizer = self.job.make_optimizer(model)
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        looks = _Looks(self)
        made: Any = _Stock if self.config is None else _Ours
        if self._encodes:
            made = _Encoded
        trainer = made(
            model=model,
            args=self._arguments(folder),
            train_dataset=self._rows(),
            eval_dataset=one_row_more(self.job),
            data_collator=_collate,
            optimizers=(optimizer, constant),
            callbacks=[looks],
        )
        trainer.remove_callback(PrinterCallback)
        if self.job.encoding is not None and self._encodes:
            batches, number = self.job.batches(), self.job.window
            trainer.messages = Messages(model, self.job.encoding)
            trainer.windows = [batches[i : i + number] for i in range(0, len(batches), number)]
        looks.trainer = trainer
        outputs: tuple[Outputs, str] = ({}, "")
        evaluation = math.nan
        with in_parts(self.draw):
            trainer.train(resume_from_checkpoint=resume or None)
            if self.evaluates:
                config: object = model.config
                vocabulary = field(text_config(config), "vocab_size") or 1
                outputs = predicted(trainer, few_rows(one_row_more(self.job), vocabulary), self.names)
                evaluation = trainer.evaluate().get("eval_loss", math.nan)
        steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        return {
            "losses": [float(entry["loss"]) for entry in steps],
            "norms": [float(entry["grad_norm"]) for entry in steps],
            "skipped": trainer.dist_engine.skipped_steps if self.config else 0,
            "evaluation": evaluation,
            "outputs": outputs[0],
            "refused": outputs[1],
        }

    @property
    def _encodes(self) -> bool:
        return self.config is None and self.job.encoding is not None and self.imitates

    def _rows(self) -> list[Batch]:
        batches = self.job.batches()
        # A message is of one microbatch: rows of another one would make it another message.
        rows, step = rows_of(batches), len(rows_of(batches[:1])) * (1 if self._encodes else self.job.window)
        return in_another_order(rows, step, self.draw) if self.draw else rows

    def _arguments(self, folder: str) -> object:
        common: dict[str, Any] = dict(
            max_grad_norm=self.job.clip,
            max_steps=self.steps,
            per_device_eval_batch_size=1,
            logging_steps=1,
            logging_nan_inf_filter=False,
            remove_unused_columns=False,
            disable_tqdm=True,
            report_to=[],
            use_cpu=True,
        )
        common |= dict(save_strategy="steps" if self.save_at else "no", save_steps=self.save_at or 1)
        if self.config is None:
            rows, parts = whole_step(self.job, one_batch=not self._encodes)
            return TrainingArguments(
                folder, per_device_train_batch_size=rows, gradient_accumulation_steps=parts, **common
            )
        return DistTrainingArguments(
            folder,
            dist_config=cast(Any, self.config),
            per_device_train_batch_size=self.config["train_micro_batch_size_per_gpu"],
            gradient_accumulation_steps=self.config["gradient_accumulation_steps"],
            bf16=self.job.precision == "bf16",
            fp16=self.job.precision == "fp16",
            **common,
        )


def whole_step(job: Job, *, one_batch: bool = True) -> tuple[int, int]:
    """Rows of a batch and batches of a step in one process: one, unless the rows cannot be in one batch, or must not."""
    batches = job.batches()
    rows = len(rows_of(batches[:1]))
    steps = [batches[i : i + job.window] for i in range(0, len(batches), job.window)]
    if not one_batch or any(joined(step) is None for step in steps):
        return rows, job.window
    return rows * job.window, 1


def alone_config(job: Job) -> dict[str, object]:
    """For one process in the layout's precision, with all rows of a step in one batch, if they can be."""
    rows, parts = whole_step(job)
    return {**job.alone, "train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": parts}


class _Sequential:
    """Reads the rows in their order."""

    train_dataset: Any

    def _get_train_sampler(self, *args: object, **kwargs: object) -> Any:
        return SequentialSampler(self.train_dataset)


class _Ours(_Sequential, DistTrainer):
    pass


class _Stock(_Sequential, Trainer):
    """transformers' own, with the norm of gradients in fp64.

    torch's fp32 norm of a large tensor is no reference on CPUs: off by 3e-5 at 2 million elements, by 1e-3 at 20 million.
    """

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.clip_grad_norm_ = clip


class _Encoded(_Stock):
    """One process that encodes what the ranks of a layout would send each other."""

    messages: Messages
    windows: list[list[Batch]]
    """The microbatches of each step."""
    counts: Counts | None = None
    """See `counts_of`."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        window, number = self.windows[self.state.global_step], self.messages.number
        model.train()

        def loss_of(batch: Any, items: Any = num_items_in_batch) -> torch.Tensor:
            return cast(
                torch.Tensor, self.compute_loss(model, self._prepare_inputs(dict(batch)), num_items_in_batch=items)
            )

        with self.messages.delivered():
            if self.counts is None:
                self.counts = counts_of(window, loss_of)
            counts = self.counts(window)
            loss = loss_of(inputs) if counts is None else loss_of(inputs, None) * (counts[number] / sum(counts))
            loss.backward()
        self.messages.take()
        if self.messages.number == len(window):
            self.messages.give()
        return loss.detach()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self.messages.delivered():
            return super().evaluation_loop(*args, **kwargs)


def clip(params: Iterable[nn.Parameter], most: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clip gradients as torch does, by their norm in fp64, which is returned. `most`: 0 does not clip."""
    trained = list(params)
    norm = torch.stack([p.grad.double().norm() for p in trained if p.grad is not None]).norm()
    if most:
        torch.nn.utils.clip_grads_with_norm_(trained, most, norm)
    return norm


class _Looks(TrainerCallback):
    """Calls `look`, and saves once."""

    trainer: Any = None

    def __init__(self, training: Training) -> None:
        self._training = training

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> object:
        """After HF's own callback, which asks for a checkpoint at the end, too."""
        control.should_save = state.global_step == self._training.save_at
        self._training.look(state.global_step, self.trainer.model, getattr(self.trainer, "dist_engine", None))
        return control


def rows_of(batches: list[Batch]) -> list[Batch]:
    """Each row as a batch of one, as padded as its microbatch."""
    return [
        {key: value[i : i + 1] for key, value in batch.items()}
        for batch in batches
        for i in range(len(next(iter(batch.values()))))
    ]


def one_row_more(job: Job) -> list[Batch]:
    """Rows for an evaluation, one by one, so that each counts alike in every layout: one more than data ranks can share."""
    return rows_of(job.batches())[: job.window + 1]


def _collate(rows: list[Mapping[str, torch.Tensor]]) -> Batch:
    found = joined(rows)
    if found is None:
        shapes = [{key: tuple(value.shape[1:]) for key, value in row.items()} for row in rows]
        raise ModelError(f"--data: rows of these shapes cannot be one batch: {shapes}. Pad them in the file")
    return found


def checkpoint_of(folder: str, step: int) -> str:
    """Where the Trainer has saved."""
    return str(Path(folder) / f"checkpoint-{step}")
