"""The Trainer's loop with the meter's marks, for any class of Trainer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_dist.tools.bench.meter import Meter
from hf_dist.tools.bench.work import LEARNING_RATE, Work

__all__ = ["TrainerRun", "arguments"]


def arguments(work: Work, accumulation: int | None = None) -> dict[str, object]:
    """The Trainer's arguments for the work, without logs or saves. `accumulation`: set if ranks share rows."""
    return {
        "output_dir": f"{work.folder}/trainer",
        "per_device_train_batch_size": work.micro_batch,
        "gradient_accumulation_steps": accumulation or work.accumulation,
        "max_steps": work.total_steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": work.clip,
        "optim": "adamw_torch_fused",
        "bf16": work.bf16,
        "train_sampling_strategy": "sequential",
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": work.device == "cuda",
    }


class TrainerRun:
    """An engine whose loop is `Trainer.train`."""

    def __init__(self, work: Work, trainer: type[Trainer], args: TrainingArguments) -> None:
        self._work = work
        self._args = args
        self._class = trainer
        self.prepared: Any = lambda trainer: None
        """Called with the trainer before it trains."""

    def run(self, meter: Meter) -> None:
        """All steps of the work. Collective: every rank."""
        losses: list[torch.Tensor] = []
        base: Any = self._class

        class Measured(base):
            def compute_loss(self, *args: object, **kwargs: object) -> object:
                meter.mark("data")
                loss = super().compute_loss(*args, **kwargs)
                losses.append(loss.detach())
                meter.mark("forward")
                return loss

            def training_step(self, *args: object, **kwargs: object) -> object:
                result = super().training_step(*args, **kwargs)
                meter.mark("backward")
                return result

        class Steps(TrainerCallback):
            def on_step_end(
                self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
            ) -> None:
                meter.mark("optimizer")
                meter.end_step(torch.stack(losses).float().mean())
                losses.clear()

        rows = [
            {key: value[i] for key, value in batch.items()}
            for batch in self._work.batches()
            for i in range(self._work.micro_batch)
        ]
        model: Any = self._work.make_model()
        model.accepts_loss_kwargs = False  # average each microbatch's loss, as the other loops do
        trainer: Any = Measured(model=model, args=self._args, train_dataset=rows, callbacks=[Steps()])
        self.prepared(trainer)
        trainer.train()
