"""Muon with an auxiliary Adam, by DeepSpeed's parameters: matrices are stepped along an orthogonalised momentum.

Sources of the rules: Jordan et al. 2024 (kellerjordan.github.io/posts/muon), torch.optim.Muon, DeepSpeed's MuonWithAuxAdam.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

__all__ = [
    "MOMENTUM",
    "Muon",
    "apply",
    "is_matrix",
    "is_muon",
    "iterates_in",
    "matrix_shape",
    "muon_groups",
    "orthogonalised",
]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MUON = {"momentum": 0.95, "nesterov": True, "ns_coefficients": _COEFFICIENTS, "eps": 1e-7, "ns_steps": 5}
_ADAM_BETAS, _ADAM_EPS = (0.9, 0.95), 1e-10
_MUON_LR, _ADAM_LR = 0.02, 3e-4
MOMENTUM = "momentum_buffer"
"""The state of a matrix."""
_NOT_MATRICES = ("embed", "lm_head")
"""Parts of names whose tensors Adam steps, whatever their shape."""


class Muon(torch.optim.AdamW):
    """Groups with `use_muon` have matrices, the others are AdamW's. An engine lends matrices no gradient and steps them."""

    def __init__(self, groups: Iterable[dict[str, Any]], **options: Any) -> None:
        """`groups`: of `muon_groups`; `options`: of AdamW."""
        super().__init__(groups, **options)
        self.register_step_pre_hook(_step_matrices)


@torch.no_grad()
def _step_matrices(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Without an engine: matrices are stepped before Adam, which does not see their gradients."""
    for options in (group for group in optimizer.param_groups if group.get("use_muon")):
        for p in (p for p in options["params"] if p.grad is not None):
            buffer = optimizer.state[p].setdefault(MOMENTUM, torch.zeros_like(p))
            update = with_momentum(p.grad, buffer, options)
            count, rows, columns = matrix_shape(tuple(p.shape))
            for matrix, weights in zip(update.view(count, rows, columns), p.view(count, rows, columns), strict=True):
                apply(weights, orthogonalised(matrix, options), options, rows, columns)
            p.grad = None


def with_momentum(grad: torch.Tensor, buffer: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """What is orthogonalised, in the dtype of the iteration; `buffer` is brought up to date. Element by element."""
    buffer.lerp_(grad, 1 - options["momentum"])
    update = grad.lerp(buffer, options["momentum"]) if options["nesterov"] else buffer
    return update.to(iterates_in(options), copy=True)


def apply(weights: torch.Tensor, update: torch.Tensor, options: Mapping[str, Any], rows: int, columns: int) -> None:
    """Step `weights`, of a matrix of `rows` and `columns` or of a part of it. Element by element."""
    weights.mul_(1 - float(options["lr"]) * options["weight_decay"])
    weights.add_(update, alpha=-adjusted_lr(options, rows, columns))


def iterates_in(options: Mapping[str, Any]) -> torch.dtype:
    """The dtype of Newton-Schulz under the options of a param group, in which matrices also travel."""
    return torch.float32 if options.get("ns_dtype") == "fp32" else torch.bfloat16


def is_muon(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its matrices can be stepped by momentum in intervals: ours, or torch's own class."""
    return isinstance(optimizer, Muon) or type(optimizer) is torch.optim.Muon


def muon_groups(named: Iterable[tuple[str, nn.Parameter]], params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Two param groups, matrices and the rest, with the options that `params` of the `optimizer` section give them.

    A matrix has two dimensions or more, and neither "embed" nor "lm_head" in its name. A tensor of three is a batch of them.
    """
    named = list(named)
    matrices = [p for name, p in named if is_matrix(name, p.ndim)]
    chosen = {id(p) for p in matrices}
    decay = params.get("weight_decay", 0.0)
    muon = {**_MUON, "lr": params.get("muon_lr", params.get("lr", _MUON_LR)), "weight_decay": decay}
    muon |= {"momentum": params.get("momentum", _MUON["momentum"]), "adjust_lr_fn": params.get("adjust_lr_fn")}
    muon["ns_dtype"] = params.get("ns_dtype", "bf16")
    adam = {"lr": params.get("adam_lr", params.get("lr", _ADAM_LR)), "weight_decay": decay}
    adam |= {"betas": tuple(params.get("betas", _ADAM_BETAS)), "eps": params.get("eps", _ADAM_EPS)}
    return [
        {"params": matrices, "use_muon": True, **muon},
        {"params": [p for _, p in named if id(p) not in chosen], "use_muon": False, **adam},
    ]


def is_matrix(name: str, ndim: int) -> bool:
    """Whether Muon steps a parameter; the rule is DeepSpeed's."""
    return ndim >= 2 and not any(part in name.lower() for part in _NOT_MATRICES)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(number of matrices, rows, columns) of a parameter: three dimensions are a batch, four a convolution's one matrix."""
    if len(shape) == 3:
        return shape
    return 1, shape[0], math.prod(shape[1:])


def newton_schulz_cost(shape: tuple[int, ...]) -> float:
    """Operations of one iteration on a matrix of `shape`."""
    short, long = sorted(shape)
    return 4.0 * short * short * long + 2.0 * short**3


def orthogonalised(matrix: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, roughly, by Newton-Schulz in the dtype of `matrix`, which is overwritten.

    The operations of torch's, in their order: with bf16 the bits are the same.
    """
    a, b, c = options["ns_coefficients"]
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x.div_(x.norm().clamp(min=options["eps"]))
    for _ in range(options["ns_steps"]):
        gram = x @ x.T
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, update, x, beta=a)
    return x.T if tall else x


def adjusted_lr(options: Mapping[str, Any], rows: int, columns: int) -> float:
    """The learning rate of a matrix; "match_rms_adamw" takes the rates that AdamW takes."""
    if options.get("adjust_lr_fn") == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(rows, columns))
    else:
        ratio = math.sqrt(max(1, rows / columns))
    return float(options["lr"]) * ratio
