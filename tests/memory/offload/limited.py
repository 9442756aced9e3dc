"""A script: train with optimizer state on disk that is twice the memory the process may take from here on.

    python -m tests.memory.offload.limited FOLDER nvme|none [STEPS [LAYERS]]

The limit is RLIMIT_DATA (private writable memory), set after the libraries are loaded and before the model is built. Prints
the losses, how much was taken, and what is said to somebody who wants all of what is allowed beside it.
"""

from __future__ import annotations

import resource
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hf_dist

DIM, LAYERS = 512, 180
LAYER_NBYTES = 12 * DIM * DIM
"""fp32 masters and the two states of Adam."""


class Block(nn.Module):
    """One matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(DIM, DIM, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual."""
        return x + torch.tanh(self.inner(x))


def data_nbytes() -> int:
    """Private writable memory of this process now."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


def build(folder: str, device: str, layers: int = LAYERS) -> Any:
    """An engine at stage 3; weights and states on disk, or nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block().bfloat16() for _ in range(layers)))
    offload: dict[str, Any] = {}
    if device == "nvme":
        disk = {"device": "nvme", "nvme_path": folder}
        offload = {
            "offload_optimizer": {**disk, "pipeline_read": True, "pipeline_write": True},
            "offload_param": {**disk, "max_in_cpu": 0},
        }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": DIM * DIM, **offload},
        "aio": {"queue_depth": 2},
    }
    return hf_dist.initialize(model, config=config, device="cpu")


def main(folder: str, device: str, steps: int = 3, layers: int = LAYERS) -> None:
    """Set the limit, train."""
    threading.stack_size(1 << 20)  # a stack counts as data, all of it
    warm_up = build(folder, device, layers=2)  # what torch imports late, and its threads
    warm_up.backward(warm_up(torch.ones(1, DIM)).float().sum())
    warm_up.step()
    del warm_up
    before = data_nbytes()
    limit = before + layers * LAYER_NBYTES // 2
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    engine = build(folder, device, layers)
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))
    for step in range(steps):
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        print(f"step {step} loss {float(loss):.6f}", flush=True)
    held = engine.resident_nbytes()
    print(f"disk {held['disk']} allowed {limit - before} taken {data_nbytes() - before}", flush=True)
    try:
        torch.empty(limit - before, dtype=torch.uint8)
    except RuntimeError as error:
        print(str(error).splitlines()[0])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
