"""A stock script: causal language modelling from a folder, with HfArgumentParser, Trainer, metrics, checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ModelArguments:
    """The model."""

    model_name_or_path: str = field(default="")


@dataclass
class DataArguments:
    """The data."""

    train_file: str = field(default="")
    block_size: int = field(default=16)


def main() -> None:
    """Train, evaluate, save."""
    model_args, data_args, training_args = HfArgumentParser(
        (ModelArguments, DataArguments, TrainingArguments)
    ).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    raw = load_dataset("text", data_files=data_args.train_file)["train"]
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
    size = data_args.block_size

    def group(rows: dict) -> dict:
        ids = list(chain.from_iterable(tokenizer(rows["text"])["input_ids"]))
        blocks = [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)]
        return {"input_ids": blocks, "labels": [list(b) for b in blocks]}

    with training_args.main_process_first(desc="dataset map tokenization"):
        blocks = raw.map(group, batched=True, remove_columns=raw.column_names)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=blocks if training_args.do_train else None,
        eval_dataset=blocks.select(range(8)) if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        compute_metrics=lambda p: {"accuracy": float((p.predictions[:, :-1] == p.label_ids[:, 1:]).mean())},
    )
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
