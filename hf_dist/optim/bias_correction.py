"""Adam without bias correction, on torch's own classes: DeepSpeed's `bias_correction: false`, as used to train BERT.

Source of the rule: DeepSpeed ops/adam (the corrections are 1 when it is off).
"""

from __future__ import annotations

import torch

__all__ = ["leave_out_bias_correction"]

_LATE = 1e9
"""A step number at which `1 - beta ** step` is exactly 1 for every beta below 1 - 1e-7, so that torch corrects nothing."""


def leave_out_bias_correction(optimizer: torch.optim.Optimizer) -> None:
    """Make every parameter of an Adam or AdamW start at a late step number, where the correction is 1. Local.

    Alternative considered: folding the correction into the learning rate, which gives other results because of `eps`.
    """
    optimizer.register_step_pre_hook(_start_late)


def _start_late(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None or optimizer.state[p]:
                continue
            on_device = group.get("fused") or group.get("capturable")
            state = optimizer.state[p]
            state["step"] = torch.tensor(_LATE, dtype=torch.float32, device=p.device if on_device else "cpu")
            for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else [])):
                state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
