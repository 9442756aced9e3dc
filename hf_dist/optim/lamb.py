"""LAMB: Adam's direction, scaled to the norm of the tensor's weights, with DeepSpeed's parameters.

Sources: You et al. 2019, arXiv 1904.00962; DeepSpeed's FusedLamb (ops/lamb) where the paper leaves a choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hf_dist.optim.per_tensor import PerTensor

__all__ = ["Lamb"]


class Lamb(PerTensor):
    """Steps whole tensors. For weights p with gradient g, in fp32:

    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  u = m / (sqrt(v) + eps) + wd p,
    p <- p - lr' c u  with  c = clamp(|p| / |u|, min_coeff, max_coeff), 1 for a norm of 0, lr' = lr sqrt(1 - b2^t) / (1 - b1^t).
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, object]],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        """`max_coeff`, `min_coeff`: bounds of the ratio of norms; `eps_inside_sqrt`: sqrt(v + eps) instead."""
        own = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        own |= {"eps_inside_sqrt": eps_inside_sqrt, "max_coeff": max_coeff, "min_coeff": min_coeff}
        super().__init__(params, own)

    def _step_tensor(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        (beta1, beta2), eps = group["betas"], group["eps"]
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.mul_(beta1).add_(grad, alpha=1.0 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        scale = second.add(eps).sqrt_() if group["eps_inside_sqrt"] else second.sqrt().add_(eps)
        update = (first / scale).add_(p, alpha=group["weight_decay"])
        length, norm = p.norm(), update.norm()
        ratio = (length / norm).clamp_(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((length > 0) & (norm > 0), ratio, torch.ones_like(ratio))
        lr = group["lr"]
        if group["bias_correction"]:
            lr = lr * (1.0 - beta2 ** state["step"]) ** 0.5 / (1.0 - beta1 ** state["step"])
        p.sub_(update.mul_(ratio * lr))
