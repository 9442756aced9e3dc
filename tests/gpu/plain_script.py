"""A user's script, started by plain `python` on a machine with or without a GPU: `plain_script.py FOLDER CONFIG_JSON`.

Prints one line of JSON: device, losses, whether a second start goes on at the same place with the same losses.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from hf_dist import DistTrainer, DistTrainingArguments
from tests.hf.recipes import make_model, pad, texts


def start(folder: Path, config: dict[str, Any], resume: str | None = None) -> Any:
    """Eight steps, from the start or from a checkpoint."""
    arguments = DistTrainingArguments(
        str(folder), dist_config=config, max_steps=8, per_device_train_batch_size=4, learning_rate=3e-3, logging_steps=1,
        save_strategy="steps", save_steps=4, report_to=[], seed=3, bf16=config.get("bf16", {}).get("enabled", False),
        disable_tqdm=True,
    )  # fmt: skip
    trainer = DistTrainer(make_model(), arguments, train_dataset=texts(), data_collator=pad)
    trainer.train(resume)
    trainer.evaluate(texts(8))
    return trainer


def losses(trainer: Any) -> list[float]:
    """As they were logged."""
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def main() -> None:
    """Train, and again from the checkpoint in the middle."""
    folder, config = Path(sys.argv[1]), json.loads(sys.argv[2])
    first = start(folder / "first", config)
    again = start(folder / "again", config, resume=str(folder / "first" / "checkpoint-4"))
    device = next(first.model.parameters()).device
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    said = {"device": str(device), "losses": losses(first), "again": losses(again)[-4:], "peak": peak}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
