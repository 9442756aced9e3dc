"""What ranks on GPUs of their own do beside training: leave when one is killed, and touch no GPU but their own."""

from __future__ import annotations

import ctypes
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.place import GPUS, join, needs, worlds
from tests.gpu.results import record
from tests.harness import run_ranks
from tests.parity.families import make_batches, make_model
from tests.workers.launcher import launch


@pytest.mark.parametrize("world", worlds([2, 4]))
def test_the_others_leave_when_a_rank_is_killed(world: int, tmp_path: Path) -> None:
    codes, output, seconds = launch(
        "killed", tmp_path, world=world, timeout=150, worker="tests.gpu.killed", sends_sigterm=False
    )
    assert codes == [-9 if rank == 1 else 1 for rank in range(world)], output
    assert re.search(r"\[rank 0\] .*rank 1 \(pid .* it was killed", output), output
    assert seconds < 120


def has_context(index: int) -> bool:
    """Whether this process has a context on a GPU; asking makes none."""
    flags, active = ctypes.c_uint(), ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active)) == 0
    return bool(active.value)


def touched(rank: int, world: int, folder: str) -> tuple[list[int], int]:
    """(GPUs on which this rank has a context after training, a question of the watchdog, and a save in the background;
    bytes of its own GPU that are in use beside the allocator's)"""
    import hf_dist
    from hf_dist.dist import mesh

    device = join(rank, world)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "checkpoint": {"async_save": True},
    }
    engine = hf_dist.initialize(make_model("llama"), config=config, device=device)
    for batch in make_batches("llama", 2):
        engine.backward(engine(**{k: v[4 * rank : 4 * rank + 4].to(device) for k, v in batch.items()}).loss)
        engine.step()
    engine.save_checkpoint(f"{folder}/checkpoint")
    asking = threading.Thread(target=mesh.device_is_busy, args=(True,))
    asking.start()
    asking.join()
    engine.writer.wait()
    if not GPUS:
        return [], 0
    free, total = torch.cuda.mem_get_info(device)
    beside = total - free - torch.cuda.memory_reserved(device)
    return [index for index in range(torch.cuda.device_count()) if has_context(index)], beside


@pytest.mark.parametrize("world", worlds([1, 2, 4, 8]))
def test_a_rank_touches_no_gpu_but_its_own(world: int, tmp_path: Path) -> None:
    found = run_ranks(touched, world, (str(tmp_path),), timeout=200)
    for rank, (contexts, beside) in enumerate(found):
        assert contexts == ([rank] if GPUS else [])
        if rank == 0 and GPUS:
            record("overhead", {"ranks": world, "nbytes": beside})


def small_queue(rank: int, world: int) -> str:
    """What the mesh has set for CUDA."""
    import os

    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.pop("ACCELERATE_USE_CPU", None)  # no `join`, which starts CUDA: its queues are counted then
    from hf_dist.dist.mesh import build_mesh

    build_mesh(device="cuda")
    return os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]


@needs(1)
def test_streams_do_not_share_queues() -> None:
    assert run_ranks(small_queue, 1, timeout=100) == ["32"]
