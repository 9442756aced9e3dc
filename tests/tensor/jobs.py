"""What a rank does in the tests of the Trainer over split matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.hf.on_ranks import dist_trainer, record_of

PROMPTS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def section(size: int) -> dict[str, Any]:
    """Of the JSON."""
    return {"tensor_parallel": {"autotp_size": size}}


def train(folder: Path, recipe: str, stage: int, tp: int, config: Any = None, **changes: Any) -> dict[str, Any]:
    """One recipe; whole weights, on the main rank; floating-point operations of all ranks."""
    trainer = dist_trainer(recipe, stage, folder, {**section(tp), **(config or {})}, **changes)
    trainer.train()
    return {**record_of(trainer), "flops": trainer.state.total_flos}


def other_data(rank: int, world: int, folder: str) -> None:
    """A collator that knows the process: the ranks read different batches."""
    from tests.hf.recipes import pad

    def collate(rows: Any) -> Any:
        batch = pad(rows)
        batch["input_ids"] = batch["input_ids"].roll(rank, dims=1)
        return batch

    trainer = dist_trainer("plain", 1, Path(folder), section(2), max_steps=4)
    trainer.data_collator = collate
    trainer.train()


def generate(folder: Path, stage: int) -> dict[str, Any]:
    """Greedy, sampled, with a static cache; after two steps. And what the model says of itself."""
    trainer = dist_trainer("plain", stage, folder, section(2), max_steps=2)
    trainer.train()
    trainer.model.eval()
    asked: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "sampled": {"do_sample": True, "top_k": 0},
        "static": {"do_sample": False, "cache_implementation": "static"},
    }
    found: dict[str, Any] = {"num_parameters": trainer.model.num_parameters()}
    for name, how in asked.items():
        torch.manual_seed(3)
        with torch.no_grad():
            found[name] = trainer.model.generate(PROMPTS, max_new_tokens=6, pad_token_id=0, **how)
    with torch.no_grad():
        found["logits"] = trainer.model(input_ids=PROMPTS).logits
    trainer.save_model(str(folder / "model"))
    return {**found, "folder": str(folder / "model"), "asked": asked}


def from_file(folder: Path, path: str) -> dict[str, Any]:
    """A Trainer whose JSON is a file of somebody else; and what share of the parameters was cut."""
    from hf_dist import DistTrainer, DistTrainingArguments, full_shape
    from tests.hf.recipes import RECIPES

    trainer = RECIPES["plain"].build(DistTrainer, DistTrainingArguments, folder, 2, dist_config=path)
    trainer.train()
    cut = [p.shape != full_shape(p) for p in trainer.model.parameters() for _ in range(p.numel())]
    return {**record_of(trainer), "share": sum(cut) / len(cut)}
