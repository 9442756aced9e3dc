"""Lightning: the only change is `strategy=DistStrategy(...)`.

    python examples/lightning_train.py --dist_config configs/zero3.json --devices 2 --use_cpu

Lightning starts the other processes itself. Its checkpoints are Hugging Face folders that resume on any number of processes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
from datasets import Dataset
from lightning.pytorch.callbacks import ModelCheckpoint
from small_causal_lm import described_packages, write_small_causal_lm
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

from hf_dist.lightning import DistStrategy


class CausalLM(L.LightningModule):
    """A stock model and its loss."""

    def __init__(self, checkpoint: str, learning_rate: float) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.learning_rate = learning_rate
        self.model: Any = None

    def configure_model(self) -> None:
        """Load the model here: each process reads only its part of the weights. In `__init__` it would read all weights."""
        if self.model is None:
            self.model = AutoModelForCausalLM.from_pretrained(self.checkpoint).train()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """The loss of one microbatch."""
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        """Logs the mean loss over all processes."""
        self.log("held_out_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Any torch optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def main() -> None:
    """Train, evaluate, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist_config", default="configs/zero3.json")
    parser.add_argument("--model_name_or_path", default=None)
    parser.add_argument("--output_dir", default="runs/lightning")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--use_cpu", action="store_true")
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--max_per_package", type=int, default=100)
    args = parser.parse_args()
    L.seed_everything(42)
    # Lightning starts the other processes in `fit`: they find the folder.
    checkpoint = args.model_name_or_path or write_small_causal_lm(Path(args.output_dir, "start"))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def loader(split: str) -> DataLoader[Any]:
        texts = [row["prompt"] + row["completion"] for row in described_packages(split, args.max_per_package)]
        rows = Dataset.from_dict({"input_ids": tokenizer(texts, truncation=True, max_length=128)["input_ids"]})
        collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
        return DataLoader(rows, batch_size=4, shuffle=split == "train", collate_fn=collate)  # type: ignore[arg-type]

    trainer = L.Trainer(
        accelerator="cpu" if args.use_cpu else "auto",
        devices=args.devices,
        strategy=DistStrategy(args.dist_config),
        max_steps=args.max_steps,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(args.output_dir, filename="last", save_top_k=1)],
        default_root_dir=args.output_dir,
        logger=False,
    )
    module = CausalLM(checkpoint, learning_rate=1e-3)
    trainer.fit(module, loader("train"), ckpt_path="last")  # resumes from the newest checkpoint, if one exists
    (measured,) = trainer.validate(module, loader("eval"), verbose=False)
    if trainer.is_global_zero:
        print(f"held-out loss {measured['held_out_loss']:.3f}; saved as {args.output_dir}/last.ckpt")


if __name__ == "__main__":
    main()
