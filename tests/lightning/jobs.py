"""Trainings with Lightning's Trainer: alone in one process, or with our strategy on ranks."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import hf_dist
from hf_dist.lightning import DistStrategy
from tests.hf.recipes import make_model, texts

Record = dict[str, Any]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Rows of equal length; every token counts, so that a mean of means is the mean."""
    ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


class Steps:
    """A model as users write one, under either name of Lightning."""

    trainer: Any
    log: Any
    parameters: Any

    def __init__(self, kind: str = "llama", schedule: bool = True, optimizer: bool = True) -> None:
        super().__init__()
        self.kind, self.schedule, self.optimizer = kind, schedule, optimizer
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.norms: list[float] = []
        self.seen: list[int] = []
        self.model: Any = None

    def configure_model(self) -> None:
        """Where Lightning has models made that are sharded."""
        if self.model is None:
            self.model = make_model(self.kind)

    def training_step(self, batch: Any, index: int) -> Any:
        """A mean over the microbatch."""
        loss = self.model(**batch).loss
        self.log("loss", loss, sync_dist=True)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))
        self.seen += batch["input_ids"][:, 0].tolist()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Before clipping; split matrices have no gradients of their own to look at."""
        engine = getattr(self.trainer.strategy, "engine", None)
        if engine is not None and engine.mesh.tp.size > 1:
            self.norms.append(float(engine.clip_grad_norm()))
        else:
            norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
            self.norms.append(float(torch.stack(norms).norm()))
        self.rates.append(optimizer.param_groups[0]["lr"])

    def validation_step(self, batch: Any, index: int) -> None:
        """The mean loss of all batches."""
        self.log("val", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """With a schedule of steps; or left to the JSON."""
        if not self.optimizer:
            return None
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=5e-3, eps=1e-3)
        if not self.schedule:
            return optimizer
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, 6)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Module(Steps, L.LightningModule):
    """Of `lightning`."""


class ByHand(Module):
    """Manual optimization: two microbatches, then a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        """Everything that Lightning does otherwise."""
        optimizer: Any = self.optimizers()
        loss = self.model(**batch).loss
        self.manual_backward(loss / 2)
        if index % 2:
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()  # type: ignore[union-attr]
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))


def loader(rows: int, seed: int, sampled: bool = True, shared: bool = False) -> Any:
    """Batches that are eight rows over all ranks, or over each."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    world, rank = (1, 0) if shared else (world, rank)
    data: Any = texts(rows, ragged=False, seed=seed)
    sampler: Any = torch.utils.data.DistributedSampler(data, world, rank, shuffle=False) if sampled else None
    return torch.utils.data.DataLoader(data, batch_size=8 // world, sampler=sampler, collate_fn=collate)


def trainer_of(stage: int | None, config: Any = None, **arguments: Any) -> Any:
    """With our strategy, or Lightning's own in one process."""
    own: Any = dict(
        accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 1)), max_steps=5, accumulate_grad_batches=2,
        gradient_clip_val=0.5, logger=False, use_distributed_sampler=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0, log_every_n_steps=1,
    )  # fmt: skip
    if stage is not None:
        own["strategy"] = DistStrategy({"zero_optimization": {"stage": stage}, **(config or {})})
    return L.Trainer(**{**own, **arguments})


def weights_of(trainer: Any, model: Any) -> dict[str, torch.Tensor]:
    """All of them, on every rank."""
    sharded = isinstance(trainer.strategy, DistStrategy)
    with hf_dist.gathered(model) if sharded else nullcontext():
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def record_of(trainer: Any, module: Any, model: Any = None) -> Record:
    """What two runs are compared by."""
    return {
        "losses": module.losses,
        "norms": module.norms,
        "rates": module.rates,
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
        "weights": weights_of(trainer, model or module.model),
    }


def fit(folder: Path, stage: int | None, kind: str = "llama", shared: bool = False, **arguments: Any) -> Record:
    """Nine batches an epoch: its last window has one microbatch. Two validations."""
    module = Module(kind)
    trainer = trainer_of(stage, val_check_interval=4, **arguments)
    trainer.fit(module, loader(72, 1, shared=shared), loader(24, 2, shared=shared))
    return record_of(trainer, module)


def by_hand(folder: Path, stage: int | None) -> Record:
    """Manual optimization, which clips and accumulates in the module."""
    module = ByHand()
    trainer = trainer_of(stage, accumulate_grad_batches=1, gradient_clip_val=None, max_steps=3)
    trainer.fit(module, loader(72, 1))
    return record_of(trainer, module)


def without_schedule(folder: Path, stage: int | None, **json: Any) -> Record:
    """Three steps; the optimizer is the JSON's where it has one."""
    module = Module(schedule=False, optimizer="optimizer" not in json)
    trainer = trainer_of(stage, json, max_steps=3)
    trainer.fit(module, loader(72, 1))
    return record_of(trainer, module)


def other_package(folder: Path, stage: int) -> Record:
    """`pytorch_lightning`, while `lightning` is imported as well."""
    import pytorch_lightning as pl

    module: Any = type("Module", (Steps, pl.LightningModule), {})("llama", False)
    strategy: Any = DistStrategy({"zero_optimization": {"stage": stage}}, package="pytorch_lightning")
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=3, accumulate_grad_batches=2, gradient_clip_val=0.5,
        logger=False, use_distributed_sampler=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, loader(72, 1))
    return record_of(trainer, module)


def validated_before(folder: Path, stage: int) -> Record:
    """`validate`, `fit`, then another Trainer that goes on with the module's shards."""
    module = Module()
    trainer = trainer_of(stage, val_check_interval=4)
    trainer.validate(module, loader(24, 2), verbose=False)
    before = float(trainer.callback_metrics["val"])
    trainer.fit(module, loader(72, 1), loader(24, 2))
    again = trainer_of(stage).validate(module, loader(24, 2), verbose=False)
    return {**record_of(trainer, module), "before": before, "after": again[0]["val"]}


def epochs(
    folder: Path,
    stage: int | None,
    to: str = "",
    last: int = 3,
    come_from: str = "",
    kind: str = "llama",
    config: Any = None,
) -> Record:
    """Two steps an epoch; a checkpoint at the end of each, of which the best is kept, and the last."""
    module = Module(kind)
    saves = ModelCheckpoint(
        to,
        "{epoch}",
        monitor="step",
        mode="max",
        save_top_k=1,
        save_last=True,
        save_on_train_epoch_end=True,
        enable_version_counter=False,
    )
    trainer = trainer_of(
        stage, config, max_steps=-1, max_epochs=last, enable_checkpointing=bool(to), callbacks=[saves] if to else []
    )
    trainer.fit(module, loader(32, 1), loader(24, 2), ckpt_path=come_from or None)
    record = record_of(trainer, module)
    if to:
        trainer.save_checkpoint(f"{to}/weights", weights_only=True)
        record["tested"] = trainer_of(stage, config).validate(
            module, loader(24, 2), ckpt_path=f"{to}/weights", verbose=False
        )[0]["val"]
    return record


def seen(folder: Path) -> list[list[int]]:
    """First tokens of the rows that each rank reads with Lightning's own sampler."""
    module = Module()
    trainer = trainer_of(1, use_distributed_sampler=True, max_steps=1)
    trainer.fit(module, loader(64, 1, sampled=False))
    return [module.seen, trainer.train_dataloader.sampler.num_replicas]


def halves(folder: Path) -> list[Any]:
    """Losses of bf16 by the JSON and by the argument, and the dtype of the model."""
    result: list[Any] = []
    for config, arguments in (({"bf16": {"enabled": True}}, {}), ({}, {"precision": "bf16-true"})):
        module = Module()
        trainer_of(3, config, max_steps=2, **arguments).fit(module, loader(72, 1))
        result.append((module.losses, str(next(module.model.parameters()).dtype)))
    return result


class TwoOptimizers(Module):
    """As for a GAN."""

    def configure_optimizers(self) -> Any:
        """Two of them."""
        self.automatic_optimization = False
        return [torch.optim.SGD(self.parameters(), 0.1) for _ in range(2)]


class Listed(Module):
    """What is trained is in a list, which has no forward."""

    def configure_model(self) -> None:
        """One child, which cannot be called."""
        self.model = torch.nn.ModuleList([make_model("llama")])


class Parts(Module):
    """A body of HF's and a head of the user's own; the module's forward joins them."""

    def configure_model(self) -> None:
        """Two children that are trained."""
        if self.model is None:
            self.model = make_model("llama").model
            torch.manual_seed(3)
            self.head = torch.nn.Linear(self.model.config.hidden_size, 5)

    def forward(self, batch: Any) -> torch.Tensor:
        """A class for each row."""
        found = self.head(self.model(input_ids=batch["input_ids"]).last_hidden_state.mean(1))
        loss: torch.Tensor = torch.nn.functional.cross_entropy(found, batch["input_ids"][:, 0] % 5)
        return loss

    def training_step(self, batch: Any, index: int) -> Any:
        """Through the module itself, and past it."""
        loss = self(batch) if index % 2 else self.forward(batch)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        """Likewise."""
        self.log("val", self(batch), sync_dist=True)


def parts(folder: Path, stage: int | None) -> Record:
    """Trained parameters beside the model."""
    module = Parts()
    trainer = trainer_of(stage, val_check_interval=4)
    trainer.fit(module, loader(72, 1), loader(24, 2))
    return record_of(trainer, module, module)


def refusals(folder: Path) -> dict[str, str]:
    """What each of them says."""
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}

    def fitted(module: Any, config: Any = None, **arguments: Any) -> None:
        trainer_of(1, config, max_steps=1, **arguments).fit(module, loader(72, 1))

    cases = {
        "mixed": lambda: trainer_of(1, precision="bf16-mixed"),
        "half": lambda: trainer_of(1, {"bf16": {"enabled": False}}, precision="bf16-true"),
        "pipeline": lambda: trainer_of(1, {"pipeline": {"stages": 2}}),
        "two optimizers": lambda: fitted(TwoOptimizers(), gradient_clip_val=None, accumulate_grad_batches=1),
        "listed": lambda: fitted(Listed()),
        "accumulation": lambda: fitted(Module(), {"gradient_accumulation_steps": 4}),
        "clipping": lambda: fitted(Module(), {"gradient_clipping": 1.0}),
        "optimizer twice": lambda: fitted(Module(), {"optimizer": adam}),
        "batch norm": lambda: fitted(Module(), sync_batchnorm=True),
        "foreign": lambda: trainer_of(1).fit(Module(), loader(72, 1), ckpt_path=str(folder)),
    }
    said = {}
    for name, act in cases.items():
        try:
            act()
            said[name] = "nothing was wrong"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said
