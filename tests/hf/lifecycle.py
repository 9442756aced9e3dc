"""Saving, resuming, evaluating, generating and one's own loop: what a rank does, and what it reports."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback

from hf_dist.dist import collectives
from tests.hf.on_ranks import dist_trainer, record_of, weights_of
from tests.hf.recipes import RECIPES, Row, make_model, pad, plain_arguments, texts, warmup_decay
from tests.references import shared

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
BEST: dict[str, Any] = {
    **dict(save_strategy="epoch", eval_strategy="epoch", load_best_model_at_end=True),
    **dict(metric_for_best_model="loss", greater_is_better=True),  # the loss falls, so the first epoch is "best"
}


def local_state(trainer: Any) -> dict[str, Any]:
    """This rank's master weights and optimizer state, copied."""
    engine = trainer.dist_engine
    return _copied(
        {
            "weights": {g.layout.slots[0].name: g.source for g in engine.sharded.trainable_groups},
            "optimizer": engine.fragments.members[0].state_dict(),
            "counters": engine.plain_state()["counters"],
        }
    )


def _copied(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _copied(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_copied(value) for value in node]
    return node.clone() if isinstance(node, torch.Tensor) else node


def logged(trainer: Trainer) -> list[tuple[Any, ...]]:
    """Step, loss, gradient norm and learning rate of each step."""
    keys = ("step", "loss", "grad_norm", "learning_rate")
    return [tuple(float(entry[k]) for k in keys) for entry in trainer.state.log_history if "loss" in entry]


# ---- save and resume


def saved(folder: Path, recipe: str, stage: int, config: Any = None) -> dict[str, Any]:
    """Two steps, then `save_model`: the weights as they are in memory."""
    trainer = dist_trainer(recipe, stage, folder, config, max_steps=2)
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    return {"folder": str(folder / "saved"), "weights": weights_of(trainer)}


def resumed(folder: Path, recipe: str, stage: int, at: tuple[int, ...], config: Any = None) -> dict[str, Any]:
    """All steps at once, and again from checkpoints in new trainers; whether everything is equal bit for bit."""
    trainer = dist_trainer(recipe, stage, folder, config, save_strategy="steps", save_steps=math.gcd(*at))
    trainer.train()
    whole = {"state": local_state(trainer), "logs": logged(trainer)}
    runs = {}
    for step in at:
        again = dist_trainer(recipe, stage, folder / f"from_{step}", config)
        again.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
        runs[step] = {"state": local_state(again), "logs": logged(again)}
    return {"whole": whole, "runs": runs}


def whole(folder: Path, recipe: str, stage: int, **changes: Any) -> dict[str, Any]:
    """All steps at once, with a checkpoint after each."""
    trainer = dist_trainer(recipe, stage, folder, save_strategy="steps", save_steps=1, **changes)
    trainer.train()
    return {"logs": logged(trainer), "weights": weights_of(trainer)}


class Counted(list[Any]):
    """Rows that count how often one is read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


def resumed_at(folder: Path, recipe: str, stage: int, checkpoint: str, config: Any = None, **changes: Any) -> Any:
    """A new trainer continues from `checkpoint` ("auto": of its own folder, if there is one)."""
    trainer = dist_trainer(recipe, stage, folder, config, **changes)
    rows = trainer.train_dataset = Counted(trainer.train_dataset)
    seen: list[int] = []
    trainer.add_callback(FirstStep(seen))
    trainer.train(resume_from_checkpoint=checkpoint)
    counts = [torch.tensor(float(rows.reads))]
    collectives.all_reduce(trainer.accelerator.mesh.dp, counts[0], op="sum").wait()
    return {
        "logs": logged(trainer),
        "weights": weights_of(trainer),
        "fetched": int(counts[0]),
        "resumed_at": seen[0],
    }


class FirstStep(TrainerCallback):
    """Notes the step at which training begins."""

    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before the first step."""
        self.seen.append(state.global_step)


def resume_only(folder: Path, checkpoint: str, stage: int, recipe: str = "plain") -> str:
    """The error of resuming from a checkpoint that does not fit."""
    trainer = dist_trainer(recipe, stage, folder)
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "resumed"


def resumed_after_evaluation(folder: Path, recipe: str, stage: int, checkpoint: str, config: Any = None) -> Any:
    """Evaluate first, so that the checkpoint is loaded into a model that is already sharded."""
    trainer = dist_trainer(recipe, stage, folder, config)
    trainer.evaluate()
    trainer.train(resume_from_checkpoint=checkpoint)
    return {"state": local_state(trainer), "logs": logged(trainer)}


def best(folder: Path, recipe: str, stage: int, only_model: bool, config: Any = None) -> dict[str, Any]:
    """The best model is that of the first of two epochs."""
    trainer = dist_trainer(recipe, stage, folder, config, **BEST, save_only_model=only_model)
    trainer.train()
    metrics = trainer.evaluate()
    first = next(e for e in trainer.state.log_history if "eval_loss" in e)
    return {
        "checkpoint": trainer.state.best_model_checkpoint,
        "weights": weights_of(trainer),
        "losses": (metrics["eval_loss"], first["eval_loss"]),
    }


# ---- more than one call


def twice(folder: Path, recipe: str, stage: int, config: Any = None) -> dict[str, Any]:
    """`train()` called two times."""
    trainer = dist_trainer(recipe, stage, folder, config, max_steps=4)
    return train_twice(trainer)


def train_twice(trainer: Any) -> dict[str, Any]:
    """Record after the second call."""
    trainer.train()
    trainer.train()
    return record_of(trainer)


def evaluated(folder: Path, recipe: str, stage: int, config: Any = None, **changes: Any) -> dict[str, Any]:
    """See `evaluate_around`."""
    return evaluate_around(dist_trainer(recipe, stage, folder, config, **changes))


def stock_evaluated(recipe: str, data_ranks: int, **changes: Any) -> dict[str, Any]:
    """`evaluate_around` of the stock Trainer in one process; once per test run."""

    def run() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return evaluate_around(RECIPES[recipe].in_one_process(folder, data_ranks, **changes))

    return shared(("stock Trainer evaluates", recipe, data_ranks, sorted(changes.items())), run)


def evaluate_around(trainer: Any) -> dict[str, Any]:
    """Metrics before training, the record of the training, metrics and predictions after it."""
    before = trainer.evaluate()
    trainer.train()
    after = trainer.predict(trainer.eval_dataset)
    keys = ("loss", "accuracy", "order")
    return {
        "before": {k: before[f"eval_{k}"] for k in keys if f"eval_{k}" in before},
        "after": {k: after.metrics[f"test_{k}"] for k in keys if f"test_{k}" in after.metrics},
        "predictions": torch.from_numpy(after.predictions),
        **record_of(trainer),
    }


# ---- precision, optimizers of the JSON


def precision(folder: Path, stage: int, dtype: str) -> dict[str, Any]:
    """Train with `dtype` from the JSON only, watching autocast and the dtypes inside a forward."""
    trainer = dist_trainer("plain", stage, folder, {dtype: {"enabled": True}}, max_steps=3)
    seen: set[Any] = set()

    def watch(module: Any, args: Any, output: Any) -> None:
        seen.add((torch.is_autocast_enabled("cpu"), str(module.weight.dtype), str(output.dtype)))

    trainer.model.model.layers[0].mlp.up_proj.register_forward_hook(watch)
    trainer.train()
    engine = trainer.dist_engine
    state = engine.fragments.members[0].state_dict()["state"]
    return {
        "seen": seen,
        "masters": {str(g.source.dtype) for g in engine.sharded.groups},
        "moments": {str(s["exp_avg"].dtype) for s in state.values()},
        "losses": record_of(trainer)["losses"],
        "scale": engine.loss_scale,
        "scaler": trainer.accelerator.scaler is None and not trainer.accelerator.native_amp,
    }


JSON_OPTIMIZER: dict[str, Any] = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}


def json_optimizer(folder: Path, stage: int) -> dict[str, Any]:
    """AdamW and WarmupDecayLR, all values "auto"."""
    trainer = dist_trainer("plain", stage, folder, JSON_OPTIMIZER, warmup_steps=3)
    trainer.train()
    assert len(trainer.optimizer.param_groups) == 1, "DeepSpeed's optimizer has one group"
    return record_of(trainer)


def json_section(folder: Path, stage: int, section: str) -> dict[str, Any]:
    """Only the optimizer, or only the schedule, is in the JSON; the Trainer makes the other."""
    other = {"optimizer": "scheduler", "scheduler": "optimizer"}[section]
    config = {key: value for key, value in JSON_OPTIMIZER.items() if key != other}
    trainer = dist_trainer("plain", stage, folder, config, warmup_steps=3)
    trainer.train()
    return record_of(trainer)


def json_optimizer_by_hand(
    trainer: Any, warmup: int, total: int, sections: tuple[str, ...] = ("optimizer", "scheduler")
) -> dict[str, Any]:
    """The same in one process with torch's classes; `trainer` is fresh."""
    a = trainer.args
    if "optimizer" in sections:
        trainer.optimizer = torch.optim.AdamW(
            trainer.model.parameters(), a.learning_rate, (a.adam_beta1, a.adam_beta2), a.adam_epsilon, a.weight_decay
        )
    else:
        trainer.create_optimizer()
    if "scheduler" in sections:
        trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            trainer.optimizer, lambda step: warmup_decay(step, warmup, total)
        )
    trainer.train()
    return record_of(trainer)


# ---- generation


def pairs(count: int) -> list[Row]:
    """Sequence to sequence rows whose lengths differ."""
    return [{"input_ids": r["input_ids"], "labels": r["input_ids"][: 2 + i % 5]} for i, r in enumerate(texts(count))]


def generated(folder: Path, stage: int) -> list[list[int]]:
    """Train a step, then predict with generation; ranks finish their sequences at different times."""
    from dataclasses import dataclass

    from hf_dist import DistArgsMixin, DistTrainerMixin

    @dataclass
    class Arguments(DistArgsMixin, Seq2SeqTrainingArguments):
        """Sequence to sequence arguments with `dist_config`."""

    class SequenceTrainer(DistTrainerMixin, Seq2SeqTrainer):
        """As a user would write it."""

    changes = dict(
        predict_with_generate=True, generation_max_length=12, dist_config={"zero_optimization": {"stage": stage}}
    )
    return generate(SequenceTrainer, Arguments(**plain_arguments(folder, 2, max_steps=2, **changes)))


def generate(cls: Any, arguments: Any) -> list[list[int]]:
    """Generated tokens of each row, without padding."""
    trainer = cls(make_model("t5"), arguments, train_dataset=pairs(24), data_collator=pad)
    trainer.train()
    # Rows of rank 0 end at once, those of rank 1 run to the limit, if the eos is likely for short inputs only.
    out = trainer.predict(pairs(8))
    return [[t for t in row if t not in (0, -100)] for row in out.predictions.tolist()]


# ---- one's own loop


def raw_loop(folder: Path, stage: int) -> dict[str, Any]:
    """A loop of accelerate's documentation."""
    from hf_dist import DistAccelerator

    config = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 2}
    accelerator = DistAccelerator(dist_config=config)
    losses, norms, rates, model = own_loop(accelerator, 2)
    weights = {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}
    return {"losses": losses, "norms": norms, "rates": rates, "weights": weights}


def own_loop(
    accelerator: Any, micro: int, schedule_stride: int = 1
) -> tuple[list[float], list[float], list[float], Any]:
    """Losses of microbatches (mean over ranks), norms and rates of steps, the prepared model.

    accelerate steps a schedule once per process; `schedule_stride` makes one process take as many at once.
    """
    model = make_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step * schedule_stride))
    loader = torch.utils.data.DataLoader(texts(24, ragged=False), batch_size=micro, collate_fn=pad)  # type: ignore[arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, norms, rates = [], [], []
    model.train()
    for batch in loader:
        batch["labels"] = batch["input_ids"]
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses, norms, rates, model


def file_dtype(folder: str) -> tuple[str, set[str]]:
    """The dtype that config.json names, and those of the tensors beside it."""
    from safetensors.torch import load_file

    config = json.loads(Path(folder, "config.json").read_text())
    return config["dtype"], {
        str(t.dtype).removeprefix("torch.") for t in load_file(f"{folder}/model.safetensors").values()
    }
