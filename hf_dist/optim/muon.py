"""Muon with an auxiliary Adam, with DeepSpeed's parameters: matrices are stepped along an orthogonalised momentum.

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
"""Key of a matrix's state."""
_NOT_MATRICES = ("embed", "lm_head")
"""Tensors with these parts in their names are stepped by Adam, whatever their shape."""


class Muon(torch.optim.AdamW):
    """Steps groups with `use_muon` by Muon, the others by AdamW. An engine steps matrices itself and lends them no gradient."""

    def __init__(self, groups: Iterable[dict[str, object]], **options: Any) -> None:
        """`groups`: from `muon_groups`; `options`: those of AdamW."""
        super().__init__(groups, **options)
        self.register_step_pre_hook(_step_matrices)


@torch.no_grad()
def _step_matrices(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Step matrices before Adam, and hide their gradients from it. Used without an engine."""
    for options in (group for group in optimizer.param_groups if group.get("use_muon")):
        for p in (p for p in options["params"] if p.grad is not None):
            buffer = optimizer.state[p].setdefault(MOMENTUM, torch.zeros_like(p))
            update = with_momentum(p.grad, buffer, options)
            count, rows, columns = matrix_shape(tuple(p.shape))
            for matrix, weights in zip(update.view(count, rows, columns), p.view(count, rows, columns), strict=True):
                apply(weights, orthogonalised(matrix, options), options, rows, columns)
            p.grad = None


def with_momentum(grad: torch.Tensor, buffer: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """Update `buffer` and return the update to orthogonalise, in the iteration's dtype. Element-wise."""
    buffer.lerp_(grad, 1 - options["momentum"])
    update = grad.lerp(buffer, options["momentum"]) if options["nesterov"] else buffer
    return update.to(iterates_in(options), copy=True)


def apply(weights: torch.Tensor, update: torch.Tensor, options: Mapping[str, Any], rows: int, columns: int) -> None:
    """Step `weights`, a part of a matrix of `rows` x `columns` or all of it. Element-wise."""
    weights.mul_(1 - float(options["lr"]) * options["weight_decay"])
    weights.add_(update, alpha=-adjusted_lr(options, rows, columns))


def iterates_in(options: Mapping[str, object]) -> torch.dtype:
    """The dtype, by a param group's options, in which Newton-Schulz runs and matrices are sent."""
    return torch.float32 if options.get("ns_dtype") == "fp32" else torch.bfloat16


def is_muon(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `MuonStep` can step its matrices: our class or torch's own."""
    return isinstance(optimizer, Muon) or type(optimizer) is torch.optim.Muon


def muon_groups(named: Iterable[tuple[str, nn.Parameter]], params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Two param groups, matrices and all others, with their options from `params` of the `optimizer` section.

    A matrix has two or more dimensions and neither "embed" nor "lm_head" in its name. Three dimensions are a batch of matrices.
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
    """(number of matrices, rows, columns) of a parameter: three dimensions are a batch; four are one convolution matrix."""
    if len(shape) == 3:
        return shape
    return 1, shape[0], math.prod(shape[1:])


def newton_schulz_cost(shape: tuple[int, ...]) -> float:
    """Number of operations of one Newton-Schulz iteration on a matrix of `shape`."""
    short, long = sorted(shape)
    return 4.0 * short * short * long + 2.0 * short**3


def orthogonalised(matrix: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """Approximately the nearest semi-orthogonal matrix, by Newton-Schulz in the dtype of `matrix`, which is overwritten.

    Runs torch.optim.Muon's operations in the same order, so bf16 results are bitwise equal.
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
    """The learning rate of a matrix; "match_rms_adamw" scales updates so that AdamW's learning rates fit."""
    if options.get("adjust_lr_fn") == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(rows, columns))
    else:
        ratio = math.sqrt(max(1, rows / columns))
    return float(options["lr"]) * ratio
