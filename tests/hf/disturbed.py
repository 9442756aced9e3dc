"""Adversarial training as in FGM: inside `training_step`, the embedding is moved along its gradient for a second backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_dist
from tests.hf.layout_jobs import said_by
from tests.hf.on_ranks import dist_trainer, record_of
from tests.hf.recipes import RECIPES

WEIGHT = "model.embed_tokens.weight"


def disturbing(base: Any, *, stock: bool) -> Any:
    """A Trainer class that does so; hf_dist's asks for whole weights."""

    class Disturbing(base):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            loss = super().training_step(model, dict(inputs), num_items_in_batch)
            held = [p for name, p in model.named_parameters() if name == WEIGHT]
            grads = [p.grad if stock else hf_dist.full_gradient(p) for p in held]
            around: Callable[[], Any] = nullcontext if stock else lambda: hf_dist.gathered(model, modifier_rank=0)
            with around(), torch.no_grad():
                before = [p.detach().clone() for p in held]
                for p, grad in zip(held, grads, strict=True):
                    p.add_(0.1 * grad / grad.norm())
            super().training_step(model, dict(inputs), num_items_in_batch)
            with around(), torch.no_grad():
                for p, value in zip(held, before, strict=True):
                    p.copy_(value)
            return loss

    return Disturbing


def trained(folder: Path, config: dict[str, Any] | None, data_ranks: int = 1) -> dict[str, Any]:
    """Four steps; the stock Trainer without a config."""
    recipe = RECIPES["even"]
    changes = {"max_steps": 4, "gradient_accumulation_steps": 1}
    if config is None:
        trainer = recipe.build(disturbing(Trainer, stock=True), TrainingArguments, folder, 2 * data_ranks, **changes)
    else:
        ours, arguments = disturbing(hf_dist.DistTrainer, stock=False), hf_dist.DistTrainingArguments
        trainer = recipe.build(ours, arguments, folder, 2, dist_config=config, **changes)
    trainer.train()
    return record_of(trainer)


class Reading(TrainerCallback):
    """Notes what is said of two weights that are read or written at several moments."""

    def __init__(self) -> None:
        self.said: dict[tuple[str, str, str], str] = {}

    def note(self, when: str, model: Any) -> None:
        """The words of each way to use each weight."""
        for layer, block in (("first", model.model.layers[0]), ("last", model.model.layers[1])):
            weight = block.mlp.up_proj.weight
            ways = {
                "read": lambda weight=weight: weight.norm(),
                "written": lambda weight=weight: weight.data.add_(1),
                "detached": lambda weight=weight: weight.detach().clone(),
            }
            self.said.update({(when, layer, way): said_by(call) for way, call in ways.items()})
            assert (weight.dtype, weight.dim(), len(weight)) == (torch.float32, 2, weight.shape[0])

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.note("prepared", model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.note("stepped", model)


def said(folder: Path, config: dict[str, Any]) -> dict[tuple[str, str, str], str]:
    """What is said of weights that a rank has a slice of, or nothing."""
    reading = Reading()
    trainer = dist_trainer("even", 1, folder, config, max_steps=1)
    trainer.add_callback(reading)
    trainer.train()
    trainer.evaluate()
    reading.note("evaluated", trainer.model)
    with hf_dist.gathered(trainer.model):
        reading.note("gathered", trainer.model)
    reading.note("after", trainer.model)
    return reading.said
