"""1-bit LAMB: LAMB whose ratio of norms is frozen with the variance, and then follows a variance made from the momentum.

Sources: Li et al. 2021, arXiv 2104.06069; DeepSpeed's class for names, defaults and where the paper leaves a choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hf_dist.optim.clip import norm_of
from hf_dist.optim.compressed import Compressed, Message, denominator, settled

__all__ = ["OneBitLamb", "Ratios"]


@dataclass(frozen=True)
class Ratios:
    """Numbers for the ratio of norms, each a parameter of its own in the config."""

    max_coeff: float = 10.0
    min_coeff: float = 0.01
    coeff_beta: float = 0.9
    """cb."""
    factor_max: float = 4.0
    factor_min: float = 0.5
    factor_threshold: float = 0.1
    """By which part f may change from step to step."""


class OneBitLamb(Compressed):
    """LAMB for `freeze_step` steps; afterwards v and the ratio c stay, ranks send momentum, and a factor f corrects c.

    before   u = m / (sqrt(v) + eps) + wd p,  r = clamp(|p| / |u|, min_coeff, max_coeff),  c <- cb c + (1 - cb) r,
             p <- p - lr' r u
    after    g' = (m - b1 m_before) / (1 - b1),  w <- b2 w + (1 - b2) g'^2,  f = max of (sqrt(v) + eps) / (sqrt(w) + eps),
             bounded by factor_min, factor_max and factor_threshold of the last one,  p <- p - lr' c f u
    lr' = lr sqrt(1 - b2^s) / (1 - b1^t) with `bias_correction`, for t steps of which s have changed v.

    Norms and maxima are those of whole parameters, added up over the ranks that hold parts (`Compressed.joined`).
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, object]],
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        ratios: Ratios | None = None,
    ) -> None:
        """`ratios`: the numbers for c and f; None for the defaults."""
        own: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        own |= {"bias_correction": bias_correction, "eps_inside_sqrt": eps_inside_sqrt, "freeze_step": freeze_step}
        super().__init__(params, own | asdict(ratios or Ratios()))

    def message(self) -> Message | None:
        """See `Compressed.message`."""
        return Message.MOMENTUM if self.steps >= self.param_groups[0]["freeze_step"] else None

    def begins(self) -> bool:
        """See `Compressed.begins`."""
        return self.steps == int(self.param_groups[0]["freeze_step"])

    def _each(self) -> Iterator[tuple[int, torch.Tensor, dict[str, Any]]]:
        """(number, parameter, options) of what is stepped; numbers count all parameters, so that ranks agree."""
        number = 0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield number, p, group
                number += 1

    def _step_groups(self, message: Message | None) -> None:
        some = next((p for group in self.param_groups for p in group["params"]), None)
        if some is None:
            return
        number = sum(len(group["params"]) for group in self.param_groups)
        squares = torch.zeros(number, 3, dtype=torch.float64, device=some.device)  # weights, directions, updates
        largest = torch.zeros(number, dtype=torch.float64, device=some.device)
        for k, p, group in self._each():
            state = self._updated(p, p.grad, group, message)
            direction, update = self._update(p, state, group)
            squares[k] = torch.stack([norm_of(x.reshape(-1)).double().square() for x in (p, direction, update)])
            if message is not None:
                largest[k] = self._ratio(state, group)
        if self.joined is not None:
            self.joined(squares, "sum")
            if message is not None:
                self.joined(largest, "max")
        norms, ratios = squares.sqrt().tolist(), largest.tolist()  # the one wait of the host in a step
        for k, p, group in self._each():
            state = self.state[p]
            coeff = _warm(state, group, norms[k]) if message is None else _frozen(state, group, norms[k], ratios[k])
            _, update = self._update(p, state, group)
            lr = group["lr"]
            if group["bias_correction"]:
                beta1, beta2 = group["betas"]
                lr = lr * (1.0 - beta2 ** max(state["changes"], 1)) ** 0.5 / (1.0 - beta1 ** state["step"])
            p.sub_(update.mul_(coeff * lr))

    def _updated(
        self, p: torch.Tensor, grad: torch.Tensor | None, group: dict[str, Any], message: Message | None
    ) -> dict[str, Any]:
        """The state of `p` with this step's momentum and variances."""
        assert grad is not None
        state: dict[str, Any] = self.state[p]
        if not state:
            states = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")}
            state.update(step=0, changes=0, frozen_coeff=0.0, last_factor=1.0, is_frozen=False, **states)
        (beta1, beta2), second, fresh = group["betas"], state["exp_avg_sq"], state["exp_avg_sq_fresh"]
        state["step"] += 1
        if message is None:
            self._momentum(state, grad, beta1, message)
            state["changes"] += 1
            second.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
            return state
        if not state["is_frozen"]:
            fresh.copy_(second)
            state["is_frozen"] = True
        change = state["exp_avg"] * -beta1
        change.add_(self._momentum(state, grad, beta1, message)).div_(1.0 - beta1)
        fresh.mul_(beta2).addcmul_(change, change, value=1.0 - beta2)
        return state

    @staticmethod
    def _update(p: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """(direction, update): without and with weight decay; computed twice in a step rather than kept for all parameters."""
        scale = settled if state["is_frozen"] else denominator
        direction = state["exp_avg"] / scale(state["exp_avg_sq"], group["eps"], inside=group["eps_inside_sqrt"])
        return direction, direction.add(p, alpha=group["weight_decay"])

    @staticmethod
    def _ratio(state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        """Largest frozen denominator relative to the fresh one, of elements that move."""
        eps, inside, variance = group["eps"], group["eps_inside_sqrt"], state["exp_avg_sq"]
        fresh = denominator(state["exp_avg_sq_fresh"], eps, inside=inside)
        ratios = denominator(variance, eps, inside=inside).div_(fresh).masked_fill_(variance == 0, 0.0)
        return ratios.max() if ratios.numel() else ratios.sum()


def _warm(state: dict[str, Any], group: dict[str, Any], norms: list[float]) -> float:
    """The ratio r of a step before the freeze; its running mean is kept."""
    weights, _, update = norms
    if not (weights > 0 and update > 0):
        return 1.0
    ratio = min(max(weights / update, group["min_coeff"]), group["max_coeff"])
    if ratio != 1.0:
        state["frozen_coeff"] = group["coeff_beta"] * state["frozen_coeff"] + (1.0 - group["coeff_beta"]) * ratio
    return float(ratio)


def _frozen(state: dict[str, Any], group: dict[str, Any], norms: list[float], factor: float) -> float:
    """c f of a step after the freeze; f is kept."""
    _, direction, update = norms
    if group["weight_decay"] > 0 and update > 0:
        share = min(1.0, direction / update)
        factor = factor * share + (1.0 - share)
    last, threshold = state["last_factor"], group["factor_threshold"]
    factor = min(max(factor, group["factor_min"]), group["factor_max"])
    factor = min(max(factor, last * (1.0 - threshold)), last * (1.0 + threshold))
    state["last_factor"] = factor
    return float(state["frozen_coeff"] * factor)
