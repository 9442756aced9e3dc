"""A script that is killed while it swaps: trains two steps, saves, and stops in the middle of a write of the third step.

python -m tests.memory.offload.killed SWAP CHECKPOINT TOLD
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from hf_dist.memory.offload.nvme import SwapFile
from tests.memory.offload.test_parity import BF16, offload
from tests.memory.offload.training import make_engine, train


def main(swap: str, checkpoint: str, told: str) -> None:
    """Makes the file `told` when half of a write is done, and waits there."""
    engine = make_engine(offload("nvme+nvme", swap), stage=3, **BF16)
    train(engine, 0, 2)
    engine.save_checkpoint(checkpoint)
    write = SwapFile._write_block

    def stop_half_way(file: SwapFile, data: Any, offset: int) -> None:
        write(file, data[: len(data) // 2 // 4096 * 4096], offset)
        Path(told).touch()
        time.sleep(600)

    SwapFile._write_block = stop_half_way  # type: ignore[method-assign]
    train(engine, 2, 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
