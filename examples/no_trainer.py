"""Your own loop with accelerate: the only change is `DistAccelerator` instead of `Accelerator`.

    accelerate launch --num_processes 2 examples/no_trainer.py --dist_config configs/zero3.json

It accumulates, clips, evaluates, saves a state after each epoch and resumes from the last one, on any number of processes.
(A script with the stock `Accelerator` does the same under `-m hf_dist.run --config configs/zero3.json`.)
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import ProjectConfiguration, set_seed
from datasets import Dataset
from small_causal_lm import described_packages, small_causal_lm
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, get_scheduler

from hf_dist import DistAccelerator


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist_config", default=None)
    parser.add_argument("--model_name_or_path", default=None)
    parser.add_argument("--output_dir", default="runs/no_trainer")
    parser.add_argument("--use_cpu", action="store_true")
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--max_steps", type=int, default=-1)
    parser.add_argument("--max_per_package", type=int, default=100)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    return parser.parse_args()


def evaluate(accelerator: DistAccelerator, model: Any, loader: Any) -> float:
    """Mean loss over the batches of all processes; rows that only pad the last batch are left out."""
    model.eval()
    losses = []
    for batch in loader:
        with torch.no_grad():
            loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    model.train()
    return float(torch.cat(losses).mean())


def train_epoch(accelerator: DistAccelerator, prepared: tuple[Any, Any, Any, Any], max_steps: int) -> None:
    """One epoch. Every saved state includes the step counter and the schedule."""
    model, optimizer, loader, scheduler = prepared
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.print(f"loss {loss.item():.3f}  learning rate {scheduler.get_last_lr()[0]:.2e}")
            max_steps -= 1
            if max_steps == 0:
                return


def main() -> None:
    """Train, evaluate, save."""
    args = parse_arguments()
    accelerator = DistAccelerator(
        dist_config=args.dist_config,
        cpu=args.use_cpu,
        gradient_accumulation_steps=2,
        project_config=ProjectConfiguration(
            project_dir=args.output_dir, automatic_checkpoint_naming=True, total_limit=2
        ),
    )
    set_seed(42)
    checkpoint = args.model_name_or_path or small_causal_lm(Path(args.output_dir, "start"))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)

    def tokenized(split: str) -> Dataset:
        rows = described_packages(split, args.max_per_package)
        texts = [row["prompt"] + row["completion"] for row in rows]
        return Dataset.from_dict({"input_ids": tokenizer(texts, truncation=True, max_length=128)["input_ids"]})

    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    train = DataLoader(tokenized("train"), batch_size=4, shuffle=True, collate_fn=collate)
    evaluation = DataLoader(tokenized("eval"), batch_size=4, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = get_scheduler("cosine", optimizer, 0, args.num_epochs * math.ceil(len(train) / 2))
    model, optimizer, train, evaluation, scheduler = accelerator.prepare(model, optimizer, train, evaluation, scheduler)
    if Path(args.output_dir, "checkpoints").is_dir():
        accelerator.load_state()  # the newest complete state
    for epoch in range(accelerator.project_configuration.iteration, args.num_epochs):
        train.set_epoch(epoch)
        train_epoch(accelerator, (model, optimizer, train, scheduler), args.max_steps)
        accelerator.save_state()
        accelerator.print(f"epoch {epoch}: held-out loss {evaluate(accelerator, model, evaluation):.3f}")
    accelerator.unwrap_model(model).save_pretrained(args.output_dir)
    if accelerator.is_main_process:
        tokenizer.save_pretrained(args.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
