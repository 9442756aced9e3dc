"""The work that every engine does: model, batches, optimizer, precision. Plain data, read by every rank from a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_dist.hf.model_class import model_class, new_model

__all__ = ["LEARNING_RATE", "WARMUP", "Batch", "Contender", "Work", "read_work", "write_work"]

Batch = dict[str, torch.Tensor]
WARMUP = 2
"""Steps before the timed ones, for allocations and the recording of the gather order."""
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Contender:
    """One row of the table: an engine, with its config if it takes one."""

    engine: str
    name: str
    """Name in the table."""
    config: dict[str, Any] | None = None
    python: str = ""
    """Another interpreter; empty for this one."""


@dataclass(frozen=True)
class Work:
    """The work that all contenders do."""

    folder: str
    """Contains the model's `config.json`, `batches.pt`, and later the results."""
    weights: str
    """A folder or a hub ID to read weights from; empty for random weights."""
    class_name: str
    dtype: str
    """fp32 or bf16: dtype of the weights in forward and backward; their masters are fp32."""
    reduce_dtype: str
    """Dtype of gradient reductions, for engines without a config."""
    ranks: int
    steps: int
    """Number of timed steps."""
    micro_batch: int
    window: int
    """Microbatches per step over all ranks."""
    clip: float
    tokens_per_step: int
    """Tokens without padding, over all ranks; rows if the model reads no tokens."""
    unit: str
    """tokens or samples"""
    device: str
    """cuda or cpu"""

    @property
    def accumulation(self) -> int:
        """Microbatches per step if every rank reads different rows."""
        return self.window // self.ranks

    @property
    def bf16(self) -> bool:
        """Whether weights are bf16 in forward and backward."""
        return self.dtype == "bf16"

    @property
    def total_steps(self) -> int:
        """Steps for warm-up, timing, one to count bytes, and on GPUs one under the profiler."""
        return WARMUP + self.steps + (2 if self.device == "cuda" else 1)

    @property
    def model_config(self) -> object:
        """The HF config, without dropout."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.folder)

    def make_model(self) -> nn.Module:
        """The same model on every rank and under every engine: fp32, on the host, in training mode."""
        config = self.model_config
        torch.manual_seed(0)
        if self.weights:
            cls: Any = model_class(self.class_name)
            model: nn.Module = cls.from_pretrained(self.weights, config=config, dtype=torch.float32)
        else:
            model = new_model(self.class_name, config, dtype=torch.float32)
        return model.float().train()

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """torch's fused AdamW, for engines without their own optimizer."""
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def batches(self) -> list[Batch]:
        """Microbatches of all steps. With `readers` that read different rows, number `step * window + i * readers + reader` is
        the i-th of a reader's step.
        """
        loaded: list[Batch] = torch.load(f"{self.folder}/batches.pt", weights_only=True)
        return loaded

    def windows(self, reader: int, readers: int) -> Iterator[list[Batch]]:
        """The microbatches of each step for one of `readers`: every rank, or fewer readers with more microbatches each."""
        own, count = self.batches()[reader::readers], self.window // readers
        for step in range(self.total_steps):
            yield own[step * count : (step + 1) * count]


def write_work(work: Work, contender: Contender, path: Path) -> None:
    """Write the work for the ranks."""
    path.write_text(json.dumps({"work": asdict(work), "contender": asdict(contender)}), encoding="utf-8")


def read_work(path: Path) -> tuple[Work, Contender]:
    """Read the result of `write_work`."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return Work(**data["work"]), Contender(**data["contender"])
