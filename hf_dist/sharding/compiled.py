"""torch.compile of the inside of blocks: gathers, reductions and every other hook stay outside of what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_dist.log import warn_once
from hf_dist.sharding.guard import replace_method
from hf_dist.sharding.unit import ShardUnit

__all__ = ["compile_blocks"]


def compile_blocks(units: list[ShardUnit], backend: str) -> int:
    """Compile the forward of every block; the number of blocks. Local, and lazy: the first forward of each kind compiles.

    One graph serves all blocks of a class, since their parameters are inputs of it. A deep copy of the model computes
    without compilation. `backend`: a name that torch.compile knows, such as "inductor", "aot_eager".
    """
    compiled: dict[type, Callable[..., Any]] = {}
    count = 0
    for unit in units[1:]:
        for module in unit.modules:
            if isinstance(module, nn.Embedding):
                continue  # a lookup
            if "forward" in vars(module):
                warn_once(f"{unit.name}: its forward was replaced on this one module, so it is not compiled")
                continue
            cls = type(module)
            if cls not in compiled:
                compiled[cls] = torch.compile(cls.forward, backend=backend)
            replace_method(module, "forward", compiled[cls])
            count += 1
    return count
