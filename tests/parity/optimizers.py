"""Optimizers of the parity grid: what the engine is told, and what one process steps by plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.parity.families import param_groups

LR, EPS = 3e-3, 1e-3
MUON = {"lr": LR, "adam_lr": 2e-3, "momentum": 0.9, "weight_decay": 0.1, "eps": EPS, "ns_dtype": "fp32"}
ADAFACTOR = {"lr": LR, "scale_parameter": False, "relative_step": False, "weight_decay": 0.1}
LAMB = {"lr": LR, "weight_decay": 0.1, "eps": EPS}
SECTIONS: dict[str, dict[str, Any]] = {
    "muon": {"type": "Muon", "params": MUON},
    "adafactor": {"type": "Adafactor", "params": ADAFACTOR},
    "lamb": {"type": "Lamb", "params": LAMB},
}
"""The `optimizer` section."""


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """What the other cases of the grid are stepped by."""
    return torch.optim.AdamW(param_groups(model), lr=LR, eps=EPS, **options)


class PlainMuon(torch.optim.Optimizer):
    """Muon by its formula, all in fp32, one matrix after another."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            momentum.lerp_(p.grad, 1 - MUON["momentum"])
            update = p.grad.lerp(momentum, MUON["momentum"])
            matrices = update if p.dim() == 3 else update.reshape(1, p.shape[0], -1)
            scale = max(1, matrices.shape[1] / matrices.shape[2]) ** 0.5
            stepped = torch.stack([newton_schulz(matrix) for matrix in matrices]).view(p.shape)
            p.mul_(1 - LR * MUON["weight_decay"]).sub_(stepped, alpha=LR * scale)


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Five iterations on a matrix that lies or stands."""
    if matrix.shape[0] > matrix.shape[1]:
        return newton_schulz(matrix.T).T
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class PlainLamb(torch.optim.Optimizer):
    """LAMB by its formula."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            t = state["t"] = state.get("t", 0) + 1
            m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * p.grad
            v = state["v"] = 0.999 * state.get("v", 0) + 0.001 * p.grad**2
            u = m / (v.sqrt() + EPS) + LAMB["weight_decay"] * p
            ratio = min(10.0, max(0.01, float(p.norm() / u.norm()))) if p.norm() > 0 and u.norm() > 0 else 1.0
            p.sub_(u, alpha=LR * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * ratio)


class Both:
    """Two optimizers as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def plain_muon(model: nn.Module) -> Any:
    """Muon for matrices that are neither embedding nor head, Adam for the rest."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    matrices = [p for n, p in named if p.dim() >= 2 and "embed" not in n and "lm_head" not in n]
    rest = [p for _, p in named if all(p is not m for m in matrices)]
    adam = dict(lr=MUON["adam_lr"], betas=(0.9, 0.95), eps=EPS, weight_decay=MUON["weight_decay"])
    return Both(PlainMuon(matrices), *([torch.optim.AdamW(rest, **adam)] if rest else []))


def plain_adafactor(model: nn.Module) -> torch.optim.Optimizer:
    """The class of transformers."""
    from transformers.optimization import Adafactor

    return Adafactor([p for p in model.parameters() if p.requires_grad], **ADAFACTOR)


PLAIN: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": adamw,
    "muon": plain_muon,
    "adafactor": plain_adafactor,
    "lamb": lambda model: PlainLamb([p for p in model.parameters() if p.requires_grad]),
}
"""What one process steps by."""
