"""1-bit Adam and 0/1 Adam: Adam whose variance is frozen, so that ranks can send momentum in one bit an element.

Sources: Tang et al. 2021, arXiv 2102.02888; Lu et al. 2022, arXiv 2202.06009; DeepSpeed's classes for names and defaults.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hf_dist.optim.compressed import Compressed, Message, denominator, settled

__all__ = ["OneBitAdam", "ZeroOneAdam"]

_Params = Iterable[torch.Tensor] | Iterable[dict[str, object]]


class OneBitAdam(Compressed):
    """Adam with decoupled weight decay for `freeze_step` steps; afterwards v stays, and ranks send momentum.

    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2 (before the freeze),
    p <- p - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^s)) + eps) + wd p)  with t steps so far, s of which have changed v.
    """

    def __init__(
        self,
        params: _Params,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        """`bias_correction`: false leaves out both corrections, as DeepSpeed's class does whatever it says."""
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        own |= {"bias_correction": bias_correction, "eps_inside_sqrt": eps_inside_sqrt, "freeze_step": freeze_step}
        super().__init__(params, own)

    def message(self) -> Message | None:
        """See `Compressed.message`."""
        return Message.MOMENTUM if self.steps >= self.param_groups[0]["freeze_step"] else None

    def begins(self) -> bool:
        """See `Compressed.begins`."""
        return self.steps == int(self.param_groups[0]["freeze_step"])

    def _step_groups(self, message: Message | None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step_tensor(p, p.grad, group, message)

    def _step_tensor(self, p: torch.Tensor, grad: torch.Tensor, group: dict[str, Any], message: Message | None) -> None:
        state = self.state[p]
        if not state:
            state.update(step=0, changes=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        (beta1, beta2), variance = group["betas"], state["exp_avg_sq"]
        state["step"] += 1
        momentum = self._momentum(state, grad, beta1, message)
        if message is None:
            state["changes"] += 1
            variance.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        first = second = 1.0
        if group["bias_correction"]:
            first, second = 1.0 - beta1 ** state["step"], 1.0 - beta2 ** max(state["changes"], 1)
        scale = denominator if message is None else settled
        divided = scale(variance, group["eps"], inside=group["eps_inside_sqrt"], correction=second)
        p.mul_(1.0 - group["lr"] * group["weight_decay"])
        p.addcdiv_(momentum, divided, value=-group["lr"] / first)


class ZeroOneAdam(OneBitAdam):
    """`OneBitAdam` whose variance changes ever more rarely until `var_freeze_step`; gradients between are sent as signs.

    The variance changes in steps whose number is a multiple of an interval, which begins at 1 and doubles after every
    `var_update_scaler` changes. Ranks exchange momentum in every step after the freeze, so their weights are always equal:
    the paper's steps without any exchange are not taken.
    """

    def __init__(
        self,
        params: _Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
    ) -> None:
        super().__init__(params, lr, var_freeze_step, bias_correction, betas, eps, eps_inside_sqrt, weight_decay)
        for group in self.param_groups:
            group.update(var_update_scaler=var_update_scaler, interval=1, changes=0)
        self.defaults.update(var_update_scaler=var_update_scaler, interval=1, changes=0)

    def message(self) -> Message | None:
        """See `Compressed.message`."""
        if super().message() is not None:
            return Message.MOMENTUM
        return None if (self.steps + 1) % self.param_groups[0]["interval"] == 0 else Message.GRADIENT

    def _stepped(self, message: Message | None) -> None:
        """Count the changes of the variance, and double the interval."""
        for group in self.param_groups if message is None else ():
            group["changes"] += 1
            if group["changes"] == group["var_update_scaler"]:
                group.update(changes=0, interval=2 * group["interval"])
