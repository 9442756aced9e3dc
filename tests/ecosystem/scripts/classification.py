"""A stock script: sequence classification, or image classification with `--task image`, and a Trainer of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import transformers
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class DataArguments:
    """The task."""

    task: str = field(default="text")


class WeightedTrainer(Trainer):
    """A subclass as users write them."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # type: ignore[no-untyped-def]
        """Cross-entropy with class weights: a mean over the microbatch."""
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, torch.tensor([1.0, 2.0, 1.0]))
        return (loss, outputs) if return_outputs else loss


def rows(task: str, count: int) -> list[dict]:
    """Random texts or pictures of three classes."""
    g = torch.Generator().manual_seed(0)
    key = "input_ids" if task == "text" else "pixel_values"
    made = []
    for i in range(count):
        value = torch.randint(1, 50, (8,), generator=g) if task == "text" else torch.randn(3, 16, 16, generator=g)
        made.append({key: value, "labels": i % 3})
    return made


def make_model(task: str) -> torch.nn.Module:
    """A tiny encoder."""
    small = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_labels=3)
    off = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    if task == "text":
        config = transformers.DistilBertConfig(
            dim=32, hidden_dim=48, n_layers=2, n_heads=4, vocab_size=64, num_labels=3, dropout=0.0,
            attention_dropout=0.0, seq_classif_dropout=0.0,
        )  # fmt: skip
        return transformers.AutoModelForSequenceClassification.from_config(config)
    config = transformers.ViTConfig(**small, **off, image_size=16, patch_size=8)
    return transformers.AutoModelForImageClassification.from_config(config)


def main() -> None:
    """Train, evaluate, predict."""
    data_args, training_args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    data = rows(data_args.task, 24)
    trainer = WeightedTrainer(
        model=make_model(data_args.task),
        args=training_args,
        train_dataset=data,
        eval_dataset=data[:8],
        compute_metrics=lambda p: {"accuracy": float((np.argmax(p.predictions, -1) == p.label_ids).mean())},
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("eval", trainer.evaluate())
    trainer.save_metrics("test", trainer.predict(data[:4]).metrics)


if __name__ == "__main__":
    main()
