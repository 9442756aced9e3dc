"""torch.compile for the inside of blocks. Gathers, reductions and all other hooks stay outside the compiled code."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from hf_dist.log import warn_once
from hf_dist.sharding.guard import replace_method
from hf_dist.sharding.unit import ShardUnit

__all__ = ["compile_blocks"]


def compile_blocks(units: list[ShardUnit], backend: str) -> int:
    """Compile the forward of every block and return the number of blocks. Local, and lazy: the first forward compiles.

    One graph serves all blocks of a class, because parameters are inputs of the graph. A deep copy of the model runs
    uncompiled. `backend`: a name that torch.compile knows, such as "inductor", "aot_eager".
    """
    compiled: dict[type, Callable[..., object]] = {}
    count = 0
    for unit in units[1:]:
        for module in unit.modules:
            if isinstance(module, nn.Embedding):
                continue  # a lookup
            if "forward" in vars(module):
                warn_once(f"{unit.name}: not compiled, because the forward of this module object was replaced")
                continue
            cls = type(module)
            if cls not in compiled:
                compiled[cls] = torch.compile(cls.forward, backend=backend)
            replace_method(module, "forward", compiled[cls])
            count += 1
    return count
