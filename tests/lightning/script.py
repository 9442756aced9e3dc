"""A script as users start it: `python script.py`, with nothing in the environment."""

import logging
import sys
from pathlib import Path

import lightning as L
import torch

import hf_dist
from hf_dist.lightning import DistStrategy
from tests.hf.recipes import texts
from tests.lightning.jobs import Module, collate

if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Module()
    rows = texts(16, ragged=False)
    loader = torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=collate)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=DistStrategy({"zero_optimization": {"stage": 3}}), max_steps=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=sys.argv[1],
    )  # fmt: skip
    trainer.fit(module, loader)
    with hf_dist.gathered(module.model):
        norm = sum(float(p.double().norm()) for p in module.model.parameters())
    said = Path(sys.argv[1], f"rank{trainer.global_rank}.txt")  # a file each: lines of two ranks would mix on one pipe
    said.write_text(f"rank {trainer.global_rank} of {trainer.world_size} weights {norm:.9f}")
