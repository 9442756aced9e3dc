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
"""Steps before the timed ones: allocations, and gathers recorded in their order."""
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Contender:
    """One row of the table: an engine, with its config if it takes one."""

    engine: str
    name: str
    """As the table shows it."""
    config: dict[str, Any] | None = None
    python: str = ""
    """Another interpreter; empty: this one."""


@dataclass(frozen=True)
class Work:
    """What all of them do."""

    folder: str
    """Here are `config.json` of the model, `batches.pt`, and later the results."""
    weights: str
    """A folder or an ID of the hub to read weights from; empty: random ones."""
    class_name: str
    dtype: str
    """fp32 or bf16: of the weights in forward and backward; their masters are fp32."""
    reduce_dtype: str
    """Of gradients on the wire, for engines that take no config."""
    ranks: int
    steps: int
    """Timed ones."""
    micro_batch: int
    window: int
    """Microbatches of a step, of all ranks together."""
    clip: float
    tokens_per_step: int
    """Without padding, over all ranks; rows where the model reads no tokens."""
    unit: str
    """tokens or samples"""
    device: str
    """cuda or cpu"""

    @property
    def accumulation(self) -> int:
        """Microbatches of a step where every rank reads rows of its own."""
        return self.window // self.ranks

    @property
    def bf16(self) -> bool:
        """Whether weights are bf16 in forward and backward."""
        return self.dtype == "bf16"

    @property
    def total_steps(self) -> int:
        """Warm-up, the timed ones, one in which bytes are counted, on GPUs one under the profiler."""
        return WARMUP + self.steps + (2 if self.device == "cuda" else 1)

    @property
    def model_config(self) -> Any:
        """The HF config, without dropout."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.folder)

    def make_model(self) -> nn.Module:
        """The same on every rank and under every engine: fp32, on the host, in training mode."""
        config = self.model_config
        torch.manual_seed(0)
        if self.weights:
            cls: Any = model_class(self.class_name)
            model: nn.Module = cls.from_pretrained(self.weights, config=config, dtype=torch.float32)
        else:
            model = new_model(self.class_name, config, dtype=torch.float32)
        return model.float().train()

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW of torch, fused, for engines that bring none of their own."""
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def batches(self) -> list[Batch]:
        """Microbatches of all steps: of `readers` that read different rows number `step * window + i * readers + reader` is
        the i-th of a reader's step.
        """
        loaded: list[Batch] = torch.load(f"{self.folder}/batches.pt", weights_only=True)
        return loaded

    def windows(self, reader: int, readers: int) -> Iterator[list[Batch]]:
        """The microbatches of each step of one of `readers`: every rank, or fewer, each of which has more of them."""
        own, count = self.batches()[reader::readers], self.window // readers
        for step in range(self.total_steps):
            yield own[step * count : (step + 1) * count]


def write_work(work: Work, contender: Contender, path: Path) -> None:
    """Leave for the ranks what they are to do."""
    path.write_text(json.dumps({"work": asdict(work), "contender": asdict(contender)}), encoding="utf-8")


def read_work(path: Path) -> tuple[Work, Contender]:
    """What `write_work` left."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return Work(**data["work"]), Contender(**data["contender"])
