"""Replicas that train alone in the Trainer and in loops of one's own: what a rank does, and what it reports."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from hf_dist import DistTrainer, DistTrainingArguments
from hf_dist.dist import comm_counter, mesh
from tests.hf.lifecycle import local_state, logged
from tests.hf.on_ranks import weights_of
from tests.hf.recipes import Recipe, Row, texts

ACROSS = ("dp_replicate", "world", "dp", "data", "control")
DILOCO = {"every": 2, "outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": True}


IN_TURN = {**DILOCO, "fragments": 2, "overlap": 1, "mix": 0.5}


def all_labels() -> list[Row]:
    """48 rows with as many labels each."""
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in texts(48, ragged=False)]


EVEN = Recipe(rows=all_labels, optim="sgd", max_grad_norm=0.0, gradient_accumulation_steps=1, num_train_epochs=1)
"""Every rank has as many labels: with SGD and a meeting at every step that is data parallelism."""
RAGGED = Recipe(
    rows=lambda: texts(48), trainer={"eval_dataset": texts(48)[:10]}, gradient_accumulation_steps=2, max_steps=7
)


class Watched(DistTrainer):
    """Notes what is counted, and what travels between replicas, at every step."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """HF's; a window begins here and ends where the next one begins."""
        self._end_step()
        batches, items = super().get_batch_samples(*args, **kwargs)
        labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        self.__dict__.setdefault("counted", []).append((labels, int(items)))
        self.tokens = self.__dict__.get("tokens", 0) + sum(batch["input_ids"].numel() for batch in batches)
        return batches, items

    def _end_step(self) -> None:
        notes, now = self.__dict__.setdefault("notes", []), mesh.sequence_number()
        if "sent" in self.__dict__:
            self.record.__exit__(None, None, None)
            entries = [(e.op, e.axis, e.nbytes) for e in self.sent.entries if e.axis in ACROSS]
            notes.append((self.state.global_step, entries, now - self.number))
        self.record = comm_counter.record()
        self.sent, self.number = self.record.__enter__(), now

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """HF's."""
        if self.model.training:
            self.processes = self.accelerator.num_processes
        return super().compute_loss(*args, **kwargs)


class Told(TrainerCallback):
    """One rank is told to stop after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Rank 1 of the job."""
        if state.global_step == self.step and int(os.environ["RANK"]) == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def trainer_for(
    recipe: Recipe, folder: Path, section: dict[str, Any], stage: int = 3, shard: int = 2, **changes: Any
) -> Watched:
    """Micro batches of two rows."""
    config = {"zero_optimization": {"stage": stage, "mics_shard_size": shard}, "local_sgd": section}
    made: Watched = recipe.build(Watched, DistTrainingArguments, folder, 2, dist_config=config, **changes)
    return made


def plain(folder: Path, stage: int, shard: int) -> dict[str, Any]:
    """Plain SGD, a meeting at every step."""
    trainer = trainer_for(EVEN, folder, {"every": 1}, stage, shard)
    trainer.train()
    return {"weights": weights_of(trainer)}


def watched(folder: Path, resume_at: int = 0, in_turn: bool = False, **changes: Any) -> dict[str, Any]:
    """Steps that meet at every second; everything is asked for more often than that. Then resumed at a checkpoint."""
    changes = {
        **dict(save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=3, logging_steps=1),
        **dict(include_num_input_tokens_seen="all", dataloader_num_workers=0),
        **changes,
    }
    section = IN_TURN if in_turn else DILOCO
    trainer = trainer_for(RAGGED, folder, section, **changes)
    trainer.train()
    trainer._end_step()
    whole = report(trainer, folder)
    again = trainer_for(RAGGED, folder, section, **changes)
    again.train(resume_from_checkpoint=str(folder / f"checkpoint-{resume_at}"))
    return {"whole": whole, "again": report(again, folder)}


def report(trainer: Watched, folder: Path) -> dict[str, Any]:
    """What the replica logged, counted and sent; where it was evaluated and saved; what it holds."""
    return {
        "logs": logged(trainer),
        "counted": trainer.counted,
        "processes": trainer.processes,
        "notes": trainer.notes,
        "seen": trainer.state.num_input_tokens_seen,
        "tokens": trainer.tokens,
        "evaluated": [(e["step"], e["eval_loss"]) for e in trainer.state.log_history if "eval_loss" in e],
        "saved": sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*")),
        "state": local_state(trainer),
    }


def told(folder: Path, in_turn: bool = False, shard: int = 2) -> dict[str, Any]:
    """Told to stop after step 3, which is no meeting."""
    trainer = trainer_for(RAGGED, folder, IN_TURN if in_turn else DILOCO, shard=shard)
    trainer.add_callback(Told(3))
    try:
        trainer.train()
    except SystemExit as left:
        return {"code": left.code, "saved": [path.name for path in folder.glob("checkpoint-*")]}
    return {"code": None, "saved": []}


def loop(folder: Path, steps: int) -> dict[str, Any]:
    """accelerate's LocalSGD over our accelerator: SGD, then the mean of the weights every two steps."""
    from accelerate.local_sgd import LocalSGD

    from hf_dist.hf.accelerator import DistAccelerator
    from tests.parallel.local_sgd.emulation import Work, count_items, inner_for, model_for, rows_of
    from tests.parity.families import make_batches, summed_loss

    work = Work(every=2, steps=steps)
    config = {"train_micro_batch_size_per_gpu": 18, "zero_optimization": {"stage": 3, "mics_shard_size": 1}}
    accelerator = DistAccelerator(dist_config={**config, "local_sgd": {"every": 100}})
    model = model_for(work)
    model, optimizer = accelerator.prepare(model, inner_for(work, model))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local_sgd:
        for batch in make_batches(work.family, work.steps):
            rows = rows_of(batch, accelerator.process_index, accelerator.num_processes)
            with accelerator.accumulate(model):
                total, _ = summed_loss(model, rows)
                accelerator.backward(total / count_items(rows))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
    return {"weights": accelerator.get_state_dict(model)}


def loop_without_replicas(folder: Path) -> dict[str, str]:
    """The same where the config has no `local_sgd`: what is said."""
    from accelerate.local_sgd import LocalSGD

    from hf_dist.errors import ConfigError
    from hf_dist.hf.accelerator import DistAccelerator
    from tests.parallel.local_sgd.emulation import Work, inner_for, model_for

    accelerator = DistAccelerator(dist_config={"train_micro_batch_size_per_gpu": 18})
    model = model_for(Work())
    model, _ = accelerator.prepare(model, inner_for(Work(), model))
    try:
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2):
            return {"said": ""}
    except ConfigError as error:
        return {"said": str(error)}


def skipped(folder: Path, steps: int, at: tuple[int, ...]) -> dict[str, Any]:
    """fp16; the gradient of replica 1 is infinite at the steps `at`."""
    import hf_dist
    from tests.parallel.local_sgd.emulation import Work, count_items, inner_for, model_for, rows_of
    from tests.parity.families import make_batches, summed_loss

    rank, work = int(os.environ["RANK"]), Work(every=2, steps=steps)
    model = model_for(work)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 18,
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True, "initial_scale_power": 10, "hysteresis": 1},
        "zero_optimization": {"stage": 1, "mics_shard_size": 1},
        "local_sgd": work.section,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 3e-3}},
    }
    engine = hf_dist.initialize(model, config=config, optimizer=inner_for(work, model), device="cpu")
    masters, scales, rates, skips, evaluated = [], [], [], [], []
    for step, batch in enumerate(batches := make_batches(work.family, steps), 1):
        rows = rows_of(batch, rank, 2)
        total, _ = summed_loss(model, rows)
        factor = float("inf") if step in at and rank == 1 else 1.0
        engine.backward(total / count_items(rows) * factor)
        engine.step()
        masters.append(torch.cat([g.source.clone() for g in engine.sharded.trainable_groups]))
        scales.append(engine.loss_scale)
        rates.append(engine.get_lr()[0])
        skips.append(engine.step_was_skipped)
        with torch.no_grad():
            evaluated.append(float(summed_loss(model, rows_of(batches[0], 0, 2))[0]))
    return {"masters": masters, "scales": scales, "rates": rates, "skips": skips, "evaluated": evaluated}


def statistics(folder: Path, steps: int) -> list[dict[str, torch.Tensor]]:
    """Buffers after each step of replicas with BatchNorm and other rows, which meet after every second one."""
    import hf_dist
    from tests.sharding.statistics import Normed, rows

    config = {
        "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1, "mics_shard_size": 1},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "local_sgd": {"every": 2},
    }  # fmt: skip
    engine = hf_dist.initialize(Normed(), config=config, device="cpu")
    seen = []
    for step in range(steps):
        engine.backward(engine(rows(step, engine.mesh.world.rank)).square().mean())
        engine.step()
        seen.append({name: buffer.clone() for name, buffer in engine.model.named_buffers()})
    return seen
