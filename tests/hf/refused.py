"""Trainings that have to end with an error: nothing is trained, or an id or a label is none of the vocabulary's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.hf.layout_jobs import said_by
from tests.hf.on_ranks import dist_trainer
from tests.hf.recipes import VOCAB, pad


def detached(rank: int, world: int, folder: str, config: dict[str, Any]) -> None:
    """A loss without a gradient."""
    trainer = dist_trainer("even", 1, Path(folder), config, max_steps=1)
    loss_of = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        found = loss_of(*args, **kwargs)
        return (found[0].detach(), *found[1:]) if isinstance(found, tuple) else found.detach()

    trainer.compute_loss = compute_loss
    trainer.train()


def frozen(folder: Path, config: dict[str, Any]) -> list[str]:
    """No parameter is trained."""
    trainer = dist_trainer("even", 1, folder, config, max_steps=1)
    trainer.model.requires_grad_(False)
    return [said_by(trainer.train)]


def out_of_range(folder: Path, config: dict[str, Any], key: str, value: int) -> list[str]:
    """One token or label that the vocabulary does not have."""

    def collate(rows: Any) -> Any:
        batch = pad(rows)
        batch[key][0, 3] = value
        return batch

    trainer = dist_trainer("even", 1, folder, config, max_steps=1)
    trainer.data_collator = collate
    return [said_by(trainer.train)]


VALUES = {"input_ids": (-1, VOCAB, VOCAB + 1000), "labels": (-1, VOCAB, -1000)}


def at_the_edge(folder: Path, config: dict[str, Any]) -> list[str]:
    """The last token of the vocabulary, as id and as label."""
    trainer = dist_trainer("even", 1, folder, config, max_steps=1)
    trainer.train_dataset = [
        {k: torch.full_like(v, VOCAB - 1) for k, v in row.items()} for row in trainer.train_dataset
    ]
    return [said_by(trainer.train)]


def attentions(folder: Path, config: dict[str, Any]) -> list[str]:
    """A call that asks for the attention of all heads."""
    trainer = dist_trainer("even", 1, folder, config, max_steps=1)
    trainer.train()
    batch = pad(trainer.train_dataset[:2])
    return [said_by(lambda: trainer.model(**batch, output_attentions=True))]
