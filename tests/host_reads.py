"""What the host must know of a tensor, counted with the real code on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Waits(TorchDispatchMode):
    """Operations whose result's size or value the host must know, for which it waits on a GPU."""

    NAMES = ("nonzero", "bincount", "_local_scalar_dense", "masked_select", "unique", "repeat_interleave.Tensor")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        masks = func is torch.ops.aten.index.Tensor and any(x is not None and x.dtype == torch.bool for x in args[1])
        if masks or any(name == each or name.startswith(f"{each}.") for each in self.NAMES):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))
