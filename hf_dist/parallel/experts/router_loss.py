"""The load-balancing loss of a model's routers over the rows of all data ranks, as one process computes it.

HF's loss is E times the product of two means over the rows of a forward: how often each expert was chosen, and its mean
probability. The mean of such products over ranks is a different function with a different gradient. So the counts, which
have no gradient, are summed over the ranks, and each rank multiplies them by its own probabilities.

HF's Trainer divides the cross-entropy by the items of the whole window (`num_items_in_batch`), multiplies the whole loss by
the number of ranks, and does not divide by the microbatches. The auxiliary loss, already a mean, would grow with both.
In such a forward it is therefore divided by both here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis, ParallelMesh
from hf_dist.log import say_once
from hf_dist.model_config import field, text_config

__all__ = ["RouterLoss", "balance", "has_coefficient", "router_loss_for"]

_NAME = "load_balancing_loss_func"
_STOCK = "_hf_dist_stock"
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Fields of configs by which models multiply the loss, the last one JetMoe's."""

_running: RouterLoss | None = None
"""The `RouterLoss` of the model whose forward is running."""


def balance(
    gate_logits: tuple[torch.Tensor, ...],
    num_experts: int,
    top_k: int,
    attention_mask: torch.Tensor | None = None,
    axis: MeshAxis | None = None,
) -> torch.Tensor:
    """The loss over the rows of all ranks of `axis`, 0-D fp32: its mean over the ranks equals that of the joined batch.

    `gate_logits`: (rows, experts) of every layer; `attention_mask`: (batch, length), zero for padding. Collective over
    `axis`, one all-reduce of E + 1 floats.
    """
    device = gate_logits[0].device
    mask = None if attention_mask is None else attention_mask.reshape(-1).to(device, torch.float32)
    seen = torch.zeros(num_experts + 1, dtype=torch.float32, device=device)  # choices of each expert; rows
    probability = torch.zeros(num_experts, dtype=torch.float32, device=device)
    for logits in gate_logits:
        weights = torch.softmax(logits.to(device), dim=-1)
        chosen = torch.topk(weights, top_k, dim=-1).indices
        rows = torch.ones(len(weights), dtype=torch.float32, device=device) if mask is None else mask
        seen[:-1].scatter_add_(0, chosen.reshape(-1), rows.repeat_interleave(top_k))
        seen[-1] += rows.sum()
        probability = probability + (weights.float() * rows.unsqueeze(-1)).sum(0)
    ranks = 1
    if axis is not None:
        collectives.all_reduce(axis, seen, "sum").wait()
        ranks = axis.size
    return (seen[:-1] / seen[-1] * (probability / seen[-1])).sum() * num_experts * ranks


def _nobody() -> MeshAxis | None:
    return None


class RouterLoss:
    """The auxiliary loss in the forwards of one model."""

    def __init__(
        self,
        mesh: ParallelMesh,
        accumulation: int,
        *,
        joined: bool,
        split_over: Callable[[], MeshAxis | None] = _nobody,
    ) -> None:
        """`accumulation`: microbatches per window; `joined`: over all ranks of `dp`, otherwise each rank's own rows;
        `split_over()`: the ranks that each have a part of every row in the current forward, whose parts of the loss are
        summed."""
        self._split_over = split_over
        self.mesh = mesh
        self.accumulation = accumulation
        self.joined = joined
        self.parts: int | None = None
        """How many parts a loss that counts items has: microbatches per window times the ranks by which the caller multiplies.
        None: all microbatches and all ranks."""
        self._divided = 1
        self._before: RouterLoss | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> RouterLoss:
        # A copied model is not part of a job: no other rank runs it.
        return RouterLoss(self.mesh, self.accumulation, joined=False)

    def attach(self, model: nn.Module) -> None:
        """Make the forwards of `model` use this loss. Local."""
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave, prepend=True, always_call=True)

    def take_over(self, module: ModuleType) -> bool:
        """Make a modelling module's loss function call the running forward's loss. Whether it is HF's usual one. Local."""
        stock = getattr(module, _NAME)
        if hasattr(stock, _STOCK):
            return True
        if not _is_usual(stock):
            return False

        @functools.wraps(stock)
        def loss(
            gate_logits: object, num_experts: int | None = None, top_k: int = 2, attention_mask: Any = None
        ) -> torch.Tensor | int:
            own = functools.partial(stock, gate_logits, num_experts, top_k, attention_mask)
            if _running is None or not isinstance(gate_logits, tuple) or num_experts is None:
                value: torch.Tensor | int = own()
                return value
            joined = functools.partial(balance, gate_logits, num_experts, top_k, attention_mask)
            return _running._loss(own, joined, gate_logits[0].is_meta)

        setattr(loss, _STOCK, stock)
        setattr(module, _NAME, loss)
        return True

    def _loss(
        self, own: Callable[[], torch.Tensor], joined: Callable[..., torch.Tensor], is_meta: bool
    ) -> torch.Tensor:
        # Without gradient each batch is separate, because not every rank need have one.
        joins = self.joined and torch.is_grad_enabled() and not is_meta
        parts = self._split_over()
        axis = self.mesh.dp if joins else parts
        value = own() if axis is None else joined(axis=axis)
        divisor = self._divided * (1 if parts is None else parts.size)
        return value if divisor == 1 else value / divisor

    def _enter(self, model: nn.Module, args: object, kwargs: dict[str, object]) -> None:
        global _running
        self._before, _running = _running, self
        self._divided = 1
        if kwargs.get("num_items_in_batch") is not None:
            default = self.mesh.data.size * (self.accumulation if model.training else 1)
            self._divided = default if self.parts is None else self.parts

    def _leave(self, model: nn.Module, args: object, output: Any) -> None:
        global _running
        _running, self._before = self._before, None
        value = output.get("aux_loss") if self._divided != 1 and isinstance(output, dict) else None
        if isinstance(value, torch.Tensor):  # the value reported beside the loss stays the plain mean
            output["aux_loss"] = value * self._divided


def has_coefficient(config: object) -> bool:
    """Whether a model with this config can add the loss to its own; `output_router_logits` turns it on. Local."""
    text = text_config(config)
    return any(field(text, name) for name in _COEFFICIENTS)


def router_loss_for(
    model: nn.Module,
    mesh: ParallelMesh,
    accumulation: int,
    scope: str,
    split_over: Callable[[], MeshAxis | None] = _nobody,
) -> RouterLoss | None:
    """The auxiliary loss of `model`; None if its classes have none. `scope`: `hf_dist.router_loss`. Local."""
    names = dict.fromkeys(cls.__module__ for module in model.modules() for cls in type(module).__mro__)
    modules = [sys.modules[name] for name in names if hasattr(sys.modules.get(name), _NAME)]
    if not modules:
        return None
    router = RouterLoss(mesh, accumulation, joined=scope == "global", split_over=split_over)
    unknown = [module.__name__ for module in modules if not router.take_over(module)]
    if unknown and mesh.dp.size > 1:
        say_once(
            f"hf_dist.router_loss: {unknown[0]} has a load-balancing loss of its own form; where it is on, each rank takes "
            "it over its own rows"
        )
    router.attach(model)
    return router


def _is_usual(function: Callable[..., object]) -> bool:
    """Whether `function` computes the same as `balance`, tested with random rows and masks."""
    generator = torch.Generator().manual_seed(0)
    gates = tuple(torch.randn(6, 5, generator=generator) for _ in range(2))
    for mask in (None, torch.tensor([[1, 1, 0], [1, 1, 1]])):
        try:
            value = function(gates, 5, 2, mask)
        except Exception:  # a different signature or shapes
            return False
        if not isinstance(value, torch.Tensor) or not torch.allclose(value, balance(gates, 5, 2, mask), rtol=1e-5):
            return False
    return True
