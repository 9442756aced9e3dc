"""One's own loops that save and resume: what a rank does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

import hf_dist
from tests.hf.recipes import make_model, pad, texts

MICRO = 2


class Counter:
    """A registered object."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        """Plain."""
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of `state_dict()`."""
        self.seen = state["seen"]


def loop(folder: Path, stage: int, steps: range, load: str | None, save_at: tuple[int, ...], **project: Any) -> Any:
    """Steps of twelve samples in accelerate's manner; the loss of each over all ranks, and the accelerator."""
    config = {"zero_optimization": {"stage": stage}}
    accelerator = hf_dist.DistAccelerator(
        dist_config=config,
        dataloader_config=DataLoaderConfiguration(split_batches=True),  # else schedules step once per process
        project_config=ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, **project),
    )
    model = make_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(texts(48, ragged=False), batch_size=12, collate_fn=pad)  # type: ignore[arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if load is not None:
        accelerator.load_state(load or None)
    losses = []
    batches = list(loader)
    for step in steps:
        ids = batches[step]["input_ids"]
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counter.seen += 12
        losses.append((float(accelerator.reduce(loss.detach(), "mean")), scheduler.get_last_lr()[0], counter.seen))
        if step + 1 in save_at:
            accelerator.save_state()
    return losses, accelerator, model


def saved(folder: Path, stage: int) -> dict[str, Any]:
    """Four steps, a state after each but the last, two kept; the model in small files."""
    losses, accelerator, model = loop(folder, stage, range(4), None, (1, 2, 3), total_limit=2)
    accelerator.save_model(model, folder / "model", max_shard_size="20KB")
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    noise = float(torch.rand(()))
    states = sorted(path.name for path in (folder / "checkpoints").iterdir())
    accelerator.load_state()
    iteration = accelerator.project_configuration.iteration
    errors = [_error(lambda: loop(folder, stage, range(1), None, (1,)))]
    return {
        "losses": losses, "weights": weights, "noise": noise, "states": states, "iteration": iteration, "errors": errors,
        "model": sorted(path.name for path in (folder / "model").iterdir()), "folder": str(folder),
    }  # fmt: skip


def inside_a_window(folder: Path, stage: int) -> list[bool]:
    """A state saved after one microbatch of a window of two, loaded after two: which of five end a window."""
    accelerator = hf_dist.DistAccelerator(
        dist_config={"zero_optimization": {"stage": stage}}, gradient_accumulation_steps=2
    )
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ends = []
    for microbatch in range(5):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
            ends.append(accelerator.sync_gradients)
        if microbatch == 0:
            accelerator.save_state(folder / "state")
        if microbatch == 1:
            accelerator.load_state(folder / "state")
    return ends


def _error(act: Any) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def resumed(folder: Path, stage: int, state: str, first: int) -> dict[str, Any]:
    """The rest of the four steps, from a state that any layout wrote."""
    losses, accelerator, model = loop(folder, stage, range(first, 4), state, ())
    return {"losses": losses, "weights": dict(accelerator.get_state_dict(model))}


def engine_loop(folder: Path, stage: int, load: str | None = None) -> dict[str, Any]:
    """`hf_dist.initialize`: three steps with dropout, saved after the second; or the third from there."""
    torch.manual_seed(3)
    accumulation = 3
    config = {
        "zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": accumulation,
    }  # fmt: skip
    engine = hf_dist.initialize(make_model("dropout").train(), config=config)
    rank, ranks = engine.mesh.dp.rank, engine.mesh.dp.size
    rows, losses = texts(72), []
    if load is not None:
        engine.load_checkpoint(load)
    for step in range(engine.global_steps, 3):
        for micro in range(accumulation):
            at = (step * accumulation + micro) * MICRO * ranks + rank * MICRO
            loss = engine(**pad(rows[at : at + MICRO])).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        if step == 1 and load is None:
            engine.save_checkpoint(folder / "state")
    return {"losses": losses, "folder": str(folder / "state"), "names": sorted(p.name for p in folder.glob("state/*"))}


def frozen_then_trained(folder: Path, stage: int) -> tuple[list[str], float]:
    """A state saved while embeddings were frozen is loaded where they are trained: their values come from the model files."""

    def made(frozen: bool, shift: float) -> Any:
        model = make_model("bert")
        with torch.no_grad():
            for p in model.parameters():
                p.add_(shift)
        model.bert.embeddings.requires_grad_(not frozen)
        config = {"zero_optimization": {"stage": stage}, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
        return hf_dist.initialize(model, config={**config, "train_micro_batch_size_per_gpu": 1})

    made(True, 0.0).save_checkpoint(folder / "state")
    engine = made(False, 1.0)
    engine.load_checkpoint(folder / "state")
    with hf_dist.gathered(engine.model):
        expected = dict(make_model("bert").named_parameters())
        return [n for n, p in engine.model.named_parameters() if not torch.equal(p, expected[n])], float(len(expected))
