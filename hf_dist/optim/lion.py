"""Lion: the sign of an interpolated momentum as the update, with decoupled weight decay.

Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675, algorithm 2.
Defaults are those of DeepSpeed (ops/lion), whose second beta is 0.999; the paper's is 0.99.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hf_dist.optim.per_tensor import PerTensor

__all__ = ["Lion"]


class Lion(PerTensor):
    """Element-wise Lion over torch's multi-tensor operations.

    For gradient g, momentum m, parameter p, learning rate lr and decay wd, one step is
    `c = b1 m + (1 - b1) g`, `p <- p - lr (sign(c) + wd p)`, `m <- b2 m + (1 - b2) g`.
    State per parameter: `exp_avg`, in the parameter's shape and dtype. There is no step counter.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, object]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0.0:
            raise ValueError(f"lr: {lr} is not >= 0")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas: {betas} are not both in [0, 1)")
        if weight_decay < 0.0:
            raise ValueError(f"weight_decay: {weight_decay} is not >= 0")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _step_group(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for p in params:
            if "exp_avg" not in self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        grads = [p.grad for p in params]
        momenta = [self.state[p]["exp_avg"] for p in params]
        beta1, beta2 = group["betas"]
        updates = torch._foreach_lerp(momenta, grads, 1.0 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(params, 1.0 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, updates, alpha=-group["lr"])
        torch._foreach_lerp_(momenta, grads, 1.0 - beta2)
