"""Adam without bias correction follows DeepSpeed's formula from the first step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_dist.optim.build import build_optimizer

LR, BETAS, EPS, DECAY = 0.1, (0.9, 0.99), 1e-6, 0.02


def by_formula(weight: torch.Tensor, grads: list[torch.Tensor | None], decoupled: bool) -> torch.Tensor:
    """Moments without correction; the decay on the weight or in the gradient."""
    w = weight.clone().double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for grad in grads:
        if grad is None:
            continue
        g = grad.double()
        g = g if decoupled else g + DECAY * w
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g * g
        w = w - LR * (m / (v.sqrt() + EPS) + (DECAY * w if decoupled else 0))
    return w


@pytest.mark.parametrize("kernel", [{}, {"foreach": True}, {"fused": True}, {"foreach": False}])
@pytest.mark.parametrize("decoupled", [True, False])
def test_every_step_is_the_formula_also_of_a_parameter_that_joins_late(kernel: dict[str, Any], decoupled: bool) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(5), torch.randn(3)]
    grads = [[torch.randn(5) for _ in range(4)], [None, None, torch.randn(3), torch.randn(3)]]
    params = [torch.nn.Parameter(w.clone()) for w in weights]
    options = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY, "bias_correction": False, **kernel}
    optimizer = build_optimizer("Adam", {**options, "adam_w_mode": decoupled}, params)
    for step in range(4):
        for p, of_p in zip(params, grads, strict=True):
            p.grad = None if of_p[step] is None else of_p[step].clone()  # type: ignore[union-attr]
        optimizer.step()
    for p, weight, of_p in zip(params, weights, grads, strict=True):
        torch.testing.assert_close(p.detach().double(), by_formula(weight, of_p, decoupled), rtol=1e-5, atol=1e-6)


def test_a_resumed_run_goes_on_without_correction() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = build_optimizer("AdamW", {"bias_correction": False}, [p])
    p.grad = torch.ones(3)
    optimizer.step()
    twin = torch.nn.Parameter(p.detach().clone())
    resumed = build_optimizer("AdamW", {"bias_correction": False}, [twin])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.grad = torch.ones(3)
    optimizer.step()
    resumed.step()
    assert torch.equal(p, twin)
