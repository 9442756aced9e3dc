"""Stream JSONL or Parquet files with tokenisation on the fly; a stopped run goes on with the next row, on other processes.

    torchrun --nproc_per_node 2 examples/stream_files.py --dist_config configs/streams.json --use_cpu --stop_after 5
    torchrun --nproc_per_node 3 examples/stream_files.py --dist_config configs/streams.json --use_cpu
    hf-dist checkpoint data runs/stream/checkpoint-5

Every row of the files in the folder `--data` (.jsonl or .parquet) has a `text`. Into an empty folder the docstrings of the
standard library are written. `configs/streams.json` reads files in twelve lanes, which 1, 2, 3, 4, 6 or 12 processes can share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset, load_dataset
from resume_elsewhere import StopAfter
from stdlib_docstrings import docstrings, stdlib_sources
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, set_seed

from hf_dist import DistTrainer, DistTrainingArguments

GLOBAL_BATCH, MICRO_BATCH = 12, 2
LENGTH, FILES = 64, 24


@dataclass
class ExampleArguments:
    """The settings of this example."""

    data: str = field(default="runs/stream_data", metadata={"help": "A folder of .jsonl or .parquet files."})
    stop_after: int = field(default=0, metadata={"help": "Send this process SIGUSR1 after that many steps."})


def write_files(folder: Path) -> None:
    """Docstrings of the standard library, in files of several lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [text for path in stdlib_sources()[:200] for text in docstrings(path.read_text("utf-8", "ignore"))]
    for number in range(FILES):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[number::FILES][: 30 + number]]
        (folder / f"part-{number:02}.jsonl").write_text("".join(lines), encoding="utf-8")


def tokens(row: Mapping[str, Any]) -> dict[str, list[int]]:
    """The bytes of a text: a tokeniser that needs no download."""
    ids = list(str(row["text"]).encode()[:LENGTH])
    return {"input_ids": ids, "labels": ids}


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A batch."""
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100}
    return {
        name: torch.tensor([row[name] + [fill[name]] * (longest - len(row[name])) for row in rows]) for name in fill
    }


def stream(folder: Path) -> IterableDataset:
    """The rows of all files, shuffled in a buffer, as tokens."""
    files = sorted(map(str, [*folder.glob("*.jsonl"), *folder.glob("*.parquet")]))
    kind = "json" if files[0].endswith(".jsonl") else "parquet"
    rows: IterableDataset = load_dataset(kind, data_files=files, split="train", streaming=True)
    return rows.shuffle(seed=0, buffer_size=100).map(tokens, remove_columns=["text"])


def main() -> None:
    """Train, starting where an earlier run stopped."""
    parser = HfArgumentParser((ExampleArguments, DistTrainingArguments))
    parser.set_defaults(output_dir="runs/stream", max_steps=12, learning_rate=3e-3, logging_steps=1)
    parser.set_defaults(save_strategy="steps", save_steps=20, per_device_train_batch_size=MICRO_BATCH)
    example, args = parser.parse_args_into_dataclasses()
    args.gradient_accumulation_steps = GLOBAL_BATCH // (MICRO_BATCH * args.world_size)

    folder = Path(example.data)
    with args.main_process_first():
        if not any(folder.glob("*.jsonl")) and not any(folder.glob("*.parquet")):
            write_files(folder)
    set_seed(args.seed)
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **small))
    stop = StopAfter(example.stop_after)
    trainer = DistTrainer(model, args, train_dataset=stream(folder), data_collator=padded, callbacks=[stop])
    trainer.train(resume_from_checkpoint="auto")
    trainer.save_model()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"{len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
