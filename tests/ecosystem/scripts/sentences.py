"""A stock script for sentence-transformers, whose Trainer loads the best model by code of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from transformers import HfArgumentParser

from tests.ecosystem.savers import pairs


@dataclass
class ModelArguments:
    """What to train."""

    model_name_or_path: str


def main() -> None:
    """Train, load the best checkpoint, save, and write the norms of what was saved."""
    parser = HfArgumentParser((ModelArguments, SentenceTransformerTrainingArguments))
    given, args = parser.parse_args_into_dataclasses()
    model = SentenceTransformer(given.model_name_or_path, device="cpu")
    loss = losses.MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model, args, train_dataset=pairs(), eval_dataset=pairs(), loss=loss)
    trainer.train()
    trainer.save_model(args.output_dir)
    trainer.save_state()
    if trainer.is_world_process_zero():
        saved = load_file(Path(args.output_dir) / "model.safetensors")
        norms = {name: float(value.double().norm()) for name, value in saved.items()}
        (Path(args.output_dir) / "weights_results.json").write_text(json.dumps(norms))
    trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
