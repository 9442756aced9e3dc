"""Models whose losses are of every kind, rows of which any are without labels, and what a Trainer makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments

from tests.hf.on_ranks import record_of

KINDS = ("counted", "auxiliary", "sum", "mean", "mixed", "shifted", "believed", "fresh")
UNTOLD = ("mean", "shifted", "sum")
"""Also of classes that are not told the number of items: because they say so, or because their forward names all it takes."""
"""Shifted: a mean of labels without the first of each row. Believed: a mean of all, in a class that HF takes for shifted.
Fresh: a mean of a model to which all classes are as likely. Looking (not among them): a mean that needs a label in each row."""
ROWS, LENGTH, CLASSES = 12, 5, 7


class Net(nn.Module):
    """Classifies each token; its signature is the same for every kind of loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        if kind == "believed":
            self.loss_type = "ForCausalLM"
        self.embed, self.head = nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES)
        if kind == "fresh":
            self.head.weight.data *= 1e-4
            self.head.bias.data.zero_()

    def forward(self, input_ids: Any, labels: Any = None, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        hidden = torch.tanh(self.embed(input_ids))
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        if self.kind == "looking" and not (labels != -100).any(dim=1).all():
            raise IndexError("a row without labels")
        if self.kind == "shifted":
            return {
                "loss": functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
                "logits": logits,
            }
        counted = self.kind in ("counted", "auxiliary", "mixed") and num_items_in_batch is not None
        loss = functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum" if counted or self.kind == "sum" else "mean"
        )
        if counted:
            loss = loss / num_items_in_batch
        squares = hidden.square()
        more = {"auxiliary": squares.sum(), "mixed": squares.mean()}.get(self.kind, 0.0)
        return {"loss": loss + 0.1 * more, "logits": logits}


class Wrapped(Net):
    """A mean, of a forward that names no labels."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().forward(*args, **kwargs)


class Declining(Net):
    """Says that it does not count items, and must not be told them."""

    accepts_loss_kwargs = False

    def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        if "num_items_in_batch" in kwargs:
            raise TypeError("num_items_in_batch")
        return super().forward(input_ids, labels)


class Closed(Net):
    """Takes nothing but what it names."""

    def forward(self, input_ids: Any, labels: Any = None) -> Any:  # type: ignore[override]
        return super().forward(input_ids, labels)


CLASSES_OF = {"wrapped": Wrapped, "declining": Declining, "closed": Closed}


def model_of(kind: str) -> Net:
    """Of `kind`, or of a class and a kind: "closed sum"."""
    first, _, rest = kind.partition(" ")
    return CLASSES_OF[first](rest or "mean") if first in CLASSES_OF else Net(kind)


def rows(unlabelled: frozenset[int]) -> list[dict[str, torch.Tensor]]:
    """Rows of tokens with different numbers of labels, some of them without any."""
    g = torch.Generator().manual_seed(1)
    found = [{"input_ids": torch.randint(0, CLASSES, (LENGTH,), generator=g)} for _ in range(ROWS)]
    for i, row in enumerate(found):
        row["labels"] = torch.full((LENGTH,), -100) if i in unlabelled else row["input_ids"].roll(1)
        row["labels"][: i % 3] = -100
    return found


def outcome(
    folder: Path,
    kind: str,
    unlabelled: frozenset[int],
    batch: int,
    accumulation: int,
    ours: bool,
    logging_steps: int = 1,
) -> Any:
    """Losses, norms and weights of steps over all rows in order, and the loss of the run; `ours` on any number of ranks."""
    from hf_dist import DistTrainer, DistTrainingArguments

    base: Any = DistTrainer if ours else Trainer

    class InOrder(base):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    more: dict[str, Any] = {"dist_config": {"zero_optimization": {"stage": 1}}} if ours else {}
    arguments: Any = DistTrainingArguments if ours else TrainingArguments
    args = arguments(
        str(folder), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, learning_rate=0.05,
        num_train_epochs=1, logging_steps=logging_steps, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        optim="sgd", max_grad_norm=1e6, remove_unused_columns=kind != "wrapped", **more,
    )  # fmt: skip
    trainer = InOrder(model=model_of(kind), args=args, train_dataset=rows(unlabelled))
    if kind == "sum":  # an evaluation and a prediction without labels before: neither decides for training
        trainer.predict([{"input_ids": row["input_ids"]} for row in rows(unlabelled)[:4]])
    run = trainer.train()
    return {**record_of(trainer), "train_loss": run.training_loss}
