"""Adafactor with the parameters and the numbers of transformers.optimization.Adafactor.

Source: Shazeer and Stern 2018, arXiv 1804.04235. The state of a matrix holds only the row and column means of its squared
gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hf_dist.optim.per_tensor import PerTensor

__all__ = ["Adafactor"]


class Adafactor(PerTensor):
    """Steps whole tensors."""

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, object]],
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        **follows: bool,
    ) -> None:
        """`eps`: (added to squared gradients, lower bound of the parameter's scale); `follows`: `relative_step` (default true:
        the rate is a function of the step instead of `lr`) and `warmup_init`."""
        relative_step, warmup_init = follows.get("relative_step", True), follows.get("warmup_init", False)
        if unknown := follows.keys() - {"relative_step", "warmup_init"}:
            raise TypeError(f"unexpected {', '.join(sorted(unknown))}")
        if lr is not None and relative_step:
            raise ValueError('lr goes with "relative_step": false')
        if warmup_init and not relative_step:
            raise ValueError('warmup_init goes with "relative_step": true')
        own = {"lr": lr, "eps": eps, "clip_threshold": clip_threshold, "decay_rate": decay_rate, "beta1": beta1}
        own |= {"weight_decay": weight_decay, "scale_parameter": scale_parameter}
        super().__init__(params, own | {"relative_step": relative_step, "warmup_init": warmup_init})

    def _step_tensor(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            self._begin(state, grad, group)
        state["step"] += 1
        rate = _rate(p, group, state["step"])
        decay = 1.0 - state["step"] ** group["decay_rate"]
        update = _scaled(grad, state, decay, group["eps"][0])
        update.div_((_rms(update) / group["clip_threshold"]).clamp_(min=1.0)).mul_(rate)
        if group["beta1"] is not None:
            update = state["exp_avg"].mul_(group["beta1"]).add_(update, alpha=1.0 - group["beta1"])
        if group["weight_decay"]:
            p.add_(p, alpha=float(-group["weight_decay"] * rate))
        p.sub_(update)

    def _begin(self, state: dict[str, object], grad: torch.Tensor, group: dict[str, object]) -> None:
        state["step"] = 0
        if group["beta1"] is not None:
            state["exp_avg"] = torch.zeros_like(grad)
        if grad.dim() >= 2:
            state["exp_avg_sq_row"] = grad.new_zeros(grad.shape[:-1])
            state["exp_avg_sq_col"] = grad.new_zeros(grad.shape[:-2] + grad.shape[-1:])
        else:
            state["exp_avg_sq"] = torch.zeros_like(grad)


def _scaled(grad: torch.Tensor, state: dict[str, Any], decay: float, eps: float) -> torch.Tensor:
    squared = grad.square().add_(eps)
    if grad.dim() < 2:
        whole: torch.Tensor = state["exp_avg_sq"]
        return whole.mul_(decay).add_(squared, alpha=1.0 - decay).rsqrt().mul_(grad)
    row, column = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
    row.mul_(decay).add_(squared.mean(dim=-1), alpha=1.0 - decay)
    column.mul_(decay).add_(squared.mean(dim=-2), alpha=1.0 - decay)
    by_row = (row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
    return torch.mul(by_row, column.unsqueeze(-2).rsqrt()).mul_(grad)


def _rate(p: torch.Tensor, group: dict[str, Any], step: int) -> Any:
    rate = group["lr"]
    if group["relative_step"]:
        rate = min(1e-6 * step if group["warmup_init"] else 1e-2, step**-0.5)
    return max(group["eps"][1], _rms(p)) * rate if group["scale_parameter"] else rate


def _rms(values: torch.Tensor) -> torch.Tensor:
    mean: torch.Tensor = values.norm(2) / values.numel() ** 0.5
    return mean
