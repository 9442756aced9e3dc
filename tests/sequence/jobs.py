"""What a rank does in the tests of the Trainer with split sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.hf.on_ranks import dist_trainer, record_of


def split_over(ranks: int, exchange: str = "auto", **more: Any) -> dict[str, Any]:
    """The keys of the JSON."""
    return {"sequence_parallel_size": ranks, "hf_dist": {"sequence_parallel": exchange}, **more} if ranks > 1 else more


def train(folder: Path, recipe: str, stage: int, config: Any, **changes: Any) -> dict[str, Any]:
    """One recipe; weights on the main rank, and how many rows a step has."""
    trainer = dist_trainer(recipe, stage, folder, config, **changes)
    trainer.train()
    state = trainer.state
    return {**record_of(trainer), "steps": state.global_step, "epoch": state.epoch, "flops": state.total_flos}


def generate(folder: Path, stage: int) -> dict[str, Any]:
    """Greedy and sampled with a cache, between two steps and after; logits of an evaluation; what was saved."""
    trainer = dist_trainer("plain", stage, folder, split_over(2), max_steps=2)
    trainer.train()
    prompt = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    trainer.model.eval()
    with torch.no_grad():
        tokens = trainer.model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
        torch.manual_seed(11)
        sampled = trainer.model.generate(prompt, max_new_tokens=6, do_sample=True, pad_token_id=0)
        output = trainer.model(input_ids=prompt)
    trainer.save_model(str(folder / "model"))
    return {"tokens": tokens, "sampled": sampled, "logits": output.logits + 0, "folder": str(folder / "model")}


def dropout(folder: Path) -> dict[str, Any]:
    """With dropout and a collator that draws: the ranks that share rows must go on reading the same ones."""
    trainer = dist_trainer("random_collator", 1, folder, split_over(2), max_steps=4)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "next": float(torch.rand(()))}


def saved(folder: Path, stage: int, config: Any, accumulation: int) -> dict[str, Any]:
    """A whole run that saves in the middle of an epoch."""
    more = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": accumulation}
    trainer = dist_trainer("even", stage, folder, config, **more)
    trainer.train()
    return {**record_of(trainer), "checkpoint": str(folder / "checkpoint-3")}


def resumed(folder: Path, saved_by: str, stage: int, config: Any, accumulation: int) -> dict[str, Any]:
    """Train on from the checkpoint of another layout."""
    trainer = dist_trainer("even", stage, folder, config, gradient_accumulation_steps=accumulation)
    trainer.train(resume_from_checkpoint=saved_by)
    return record_of(trainer)
