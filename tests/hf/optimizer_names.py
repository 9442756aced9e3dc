"""What a rank does in the sweep over the names of `optim=`: a few steps of the Trainer, ours or the stock one.

Both ranks read the same rows, so that the mean over them has the very bits of one process's gradient: an optimizer whose states
have 8 bits turns a difference in the last bit into one of a percent.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, SequentialSampler

from tests.attempts import attempts, attempts_by_name
from tests.references import shared

STEPS, ROWS, WIDTH, WORDS = 3, 2, 64, 128
Outcome = tuple[dict[str, torch.Tensor], float]
"""Weights by name, and the loss of the evaluation after training."""


class Repeated(Dataset):
    """Every batch once for each rank; the first `seen` of them come last."""

    def __init__(self, ranks: int, seen: int = 0) -> None:
        tokens = torch.randint(0, WORDS, (STEPS * ROWS, 16), generator=torch.Generator().manual_seed(1))
        self.rows = [
            row for batch in tokens.roll(-seen * ROWS, 0).split(ROWS) for row in itertools.chain(*[batch] * ranks)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def small_model() -> Any:
    """Matrices of 4096 elements and more, from which on 8-bit states have 8 bits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = dict(hidden_size=WIDTH, intermediate_size=WIDTH, num_attention_heads=2, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_hidden_layers=1, use_cache=False, **shape))


def options(name: str) -> dict[str, Any]:
    """Arguments of the Trainer for one name."""
    few: dict[str, Any] = {}
    if "galore" in name or "apollo" in name:
        few = {"optim_target_modules": [r".*attn.*", r".*mlp.*"], "optim_args": "rank=8,update_proj_gap=2,scale=1.0"}
    common = dict(
        max_steps=STEPS, learning_rate=1e-3, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True
    )
    common |= dict(
        max_grad_norm=0.0, lr_scheduler_type="constant", dataloader_pin_memory=False, weight_decay=0.01, logging_steps=1
    )
    return {"optim": name, "per_device_train_batch_size": ROWS, **common, **few}


def train(base: type, arguments: Any, ranks: int, resume: str | None = None) -> Outcome:
    """What a Trainer of class `base` makes of the model, from the start or from a checkpoint."""

    class InOrder(base):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    trainer = InOrder(
        small_model(), arguments, train_dataset=Repeated(ranks, STEPS - 1 if resume else 0), eval_dataset=Repeated(1)
    )
    trainer.train(resume_from_checkpoint=resume)
    loss = trainer.evaluate()["eval_loss"]
    state = trainer.accelerator.get_state_dict(trainer.model)
    return {key: value.detach().clone() for key, value in state.items()}, loss


def sweep(
    rank: int, world: int, stages: dict[str, tuple[int, ...]], folder: str
) -> dict[str, dict[int, Outcome | str]]:
    """By name and stage what came of it: weights, or the error."""
    from hf_dist import DistTrainer, DistTrainingArguments

    def trained(name: str, stage: int) -> Outcome:
        config = {"zero_optimization": {"stage": stage}, "hf_dist": {"stall_report_seconds": 0, "check_load": False}}
        arguments = DistTrainingArguments(str(Path(folder) / "ours"), dist_config=config, **options(name))
        weights, loss = train(DistTrainer, arguments, world)
        return {} if rank else weights, loss

    cases = [(name, stage) for name in stages for stage in stages[name]]
    found = attempts(rank, world, (functools.partial(trained, *case) for case in cases))
    outcomes: dict[str, dict[int, Outcome | str]] = {name: {} for name in stages}
    for (name, stage), outcome in zip(cases, found, strict=True):
        outcomes[name][stage] = outcome
    return outcomes


def parted(rank: int, world: int, names: list[str], folder: str, stage: int, resumes: bool) -> dict[str, Outcome | str]:
    """By name the first steps of a training, saved, or the last one, from what others have saved. Weights are rank 0's."""
    from hf_dist import DistTrainer, DistTrainingArguments

    config = {"zero_optimization": {"stage": stage}, "hf_dist": {"stall_report_seconds": 0, "check_load": False}}

    def trained(name: str) -> Outcome:
        home = Path(folder) / name
        # Rows are other rows with another number of ranks, so none are passed over.
        more = (
            {"ignore_data_skip": True}
            if resumes
            else {"max_steps": STEPS - 1, "save_strategy": "steps", "save_steps": STEPS - 1}
        )
        arguments = DistTrainingArguments(str(home), dist_config=config, **{**options(name), **more})
        saved = str(home / f"checkpoint-{STEPS - 1}") if resumes else None
        weights, loss = train(DistTrainer, arguments, world, saved)
        return {} if rank else weights, loss

    return attempts_by_name(rank, world, {name: functools.partial(trained, name) for name in names})


def on_two(
    rank: int, world: int, stages: dict[str, tuple[int, ...]], names: list[str], rates: tuple[int, ...], folder: str
) -> tuple[dict[str, dict[int, Outcome | str]], dict[str, Outcome | str], dict[int, list[list[float]]]]:
    """`sweep`, the steps of `parted` before the save, and `shown_rates`; one spawn for all."""
    swept = sweep(rank, world, stages, folder)
    return swept, parted(rank, world, names, folder, 1, False), shown_rates(rank, world, folder, rates)


def alone(name: str, folder: str) -> Outcome:
    """The same by the stock Trainer in this process."""
    from transformers import Trainer, TrainingArguments

    arguments = lambda: TrainingArguments(str(Path(folder) / "stock"), **options(name))  # noqa: E731
    return shared(("stock Trainer, optimizer by name", name), lambda: train(Trainer, arguments(), 1))


def adafactor_rates(arguments: Any, base: type, ranks: int) -> list[list[float]]:
    """The rates of both param groups after every step, where Adafactor chooses them and HF's AdafactorSchedule shows them."""
    from transformers import TrainerCallback
    from transformers.optimization import Adafactor, AdafactorSchedule

    model = small_model()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = Adafactor([{"params": vectors}, {"params": matrices}], warmup_init=True)
    rates: list[list[float]] = []

    class Note(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **_: Any) -> None:
            rates.append([float(rate) for rate in lr_scheduler.get_last_lr()])

    trainer = base(
        model,
        arguments,
        train_dataset=Repeated(ranks),
        callbacks=[Note()],
        optimizers=(optimizer, AdafactorSchedule(optimizer)),
    )
    trainer.train()
    logged = [record["learning_rate"] for record in trainer.state.log_history[:-1]]
    assert logged == [0.0, *(first for first, _ in rates[:-1])], "the log shows the rate before the step"
    return rates


def shown_rates(rank: int, world: int, folder: str, stages: tuple[int, ...]) -> dict[int, list[list[float]]]:
    """`adafactor_rates` under us, by stage."""
    from hf_dist import DistTrainer, DistTrainingArguments

    found = {}
    for stage in stages:
        config = {"zero_optimization": {"stage": stage}, "hf_dist": {"stall_report_seconds": 0}}
        arguments = DistTrainingArguments(folder, dist_config=config, **options("adafactor"))
        found[stage] = adafactor_rates(arguments, DistTrainer, world)
    return found
