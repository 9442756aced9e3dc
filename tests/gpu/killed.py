"""A rank that is killed in the middle of a training: the worker of `test_ranks.py`."""

from __future__ import annotations

import os
import signal

import torch

from tests.gpu.place import join
from tests.parity.families import make_batches, make_model

LATE = 1
"""The rank that is killed."""


def killed(folder: str) -> None:
    """Twenty steps, of which rank 1 does three."""
    import hf_dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = join(rank, world, seconds=1800)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "hf_dist": {"stall_report_seconds": 3},
    }
    engine = hf_dist.initialize(make_model("llama"), config=config, device=device)
    for step, batch in enumerate(make_batches("llama", 20)):
        loss = engine(**{k: v[4 * rank : 4 * rank + 4].to(device) for k, v in batch.items()}).loss
        engine.backward(loss)
        if step == 3 and rank == LATE:
            torch.empty(1, device=device).item()  # what was started is done, as far as it goes alone
            os.kill(os.getpid(), signal.SIGKILL)
        engine.step()
        float(loss)


CASES = {"killed": killed}
