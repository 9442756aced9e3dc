"""A stock script without a Trainer: argparse, Accelerator, checkpoints, resume in the middle of an epoch, generation."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, get_scheduler


def main() -> None:
    """Two epochs; a state every other step; evaluation after each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--resume_from_checkpoint")
    args = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(5)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
    g = torch.Generator().manual_seed(0)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 60, (22, 12), generator=g).tolist()]
    train = DataLoader(data, batch_size=2, shuffle=True, collate_fn=default_data_collator)
    evaluation = DataLoader(data[:7], batch_size=2, collate_fn=default_data_collator)
    no_decay = ["bias", "layer_norm.weight"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.1},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-3, eps=1e-3)
    per_epoch = math.ceil(len(train) / 2)
    scheduler = get_scheduler(
        "linear", optimizer, num_warmup_steps=1, num_training_steps=2 * per_epoch * accelerator.num_processes
    )
    model, optimizer, train, evaluation, scheduler = accelerator.prepare(model, optimizer, train, evaluation, scheduler)
    per_epoch = math.ceil(len(train) / accelerator.gradient_accumulation_steps)
    history: dict = {"losses": [], "rates": [], "perplexity": []}
    first_epoch, skip, done = 0, None, 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        done = int(Path(args.resume_from_checkpoint).name.replace("step_", ""))
        first_epoch, skip = divmod(done * accelerator.gradient_accumulation_steps, len(train))
    for epoch in range(first_epoch, 2):
        model.train()
        train.set_epoch(epoch)
        active = accelerator.skip_first_batches(train, skip) if skip else train
        skip = None
        for batch in active:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            history["losses"].append(float(accelerator.gather(loss.detach()).mean()))
            history["rates"].append(scheduler.get_last_lr()[0])
            done += accelerator.sync_gradients
            if done in (0, 2):  # as HF's older scripts: also within a window, and again into the same folder
                accelerator.save_state(f"{args.output_dir}/step_{done}")
        model.eval()
        losses = []
        for batch in evaluation:
            with torch.no_grad():
                loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
        history["perplexity"].append(math.exp(torch.mean(torch.cat(losses))))
        assert len(torch.cat(losses)) == 7
    written = []
    for batch in evaluation:
        with torch.no_grad():
            tokens = accelerator.unwrap_model(model).generate(
                input_ids=batch["input_ids"][:, :4], max_new_tokens=6 + 3 * accelerator.process_index, do_sample=False
            )
        tokens = accelerator.pad_across_processes(tokens, dim=1, pad_index=0)
        written += accelerator.gather_for_metrics(tokens).tolist()
    history["written"] = [sum(row) for row in written]
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    if accelerator.is_main_process:
        AutoTokenizer.from_pretrained(args.model_name_or_path).save_pretrained(args.output_dir)
        Path(args.output_dir, "all_results.json").write_text(json.dumps(history))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
