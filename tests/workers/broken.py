"""Models on whose ranks one axis of hf_dist is broken: what a check must find, and whom it must blame.

A fault is planted when a rank makes its first model. One process has none of these axes, and the process that starts the
ranks plants nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM

from hf_dist.dist import collectives
from hf_dist.parallel.experts.exchange import ExpertExchange
from hf_dist.parallel.pipeline.runtime import ScheduleRun
from hf_dist.parallel.sequence import exchange


def _routes() -> None:
    """The last choice of every token counts half as much again in the sum of its experts."""
    original = ExpertExchange._run

    def run(self: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        factors = torch.ones(weights.shape[-1])
        factors[-1] = 1.5 if self._experts().training else 1.0  # before the first step, logits are compared
        return original(self, hidden, chosen, weights * factors)

    ExpertExchange._run = run  # type: ignore[method-assign]


def _rows() -> None:
    """The first expert of the second rank gives its rows back in another order."""
    original = ExpertExchange._compute

    def compute(self: Any, rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        made = original(self, rows, expert)
        own = (expert == 0).nonzero().flatten()
        return made.index_copy(0, own, made[own.flip(0)]) if self.axis.rank == 1 else made

    ExpertExchange._compute = compute  # type: ignore[method-assign]


def _not_averaged(name: str) -> None:
    """Gradients are not averaged over the ranks of an axis."""
    whole, parts = collectives.all_reduce, collectives.reduce_scatter

    def all_reduce(axis: Any, tensor: torch.Tensor, op: Any = "mean") -> Any:
        return collectives.Handle([]) if axis.name == name and op == "mean" else whole(axis, tensor, op)

    def reduce_scatter(axis: Any, full: torch.Tensor, out: torch.Tensor) -> Any:
        if axis.name != name:
            return parts(axis, full, out)
        out.copy_(full.view(axis.size, -1)[axis.rank])
        return collectives.Handle([])

    collectives.all_reduce, collectives.reduce_scatter = all_reduce, reduce_scatter  # type: ignore[assignment]


def _parts_of_the_loss() -> None:
    """The gradient of the second part of a sequence counts half."""
    original = exchange._TotalLoss.backward

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        none, back = original(ctx, grad)
        return none, back * (0.5 if ctx.rank == 1 else 1.0)

    forward = exchange._TotalLoss.forward

    def remembering(ctx: Any, axis: Any, part: torch.Tensor) -> torch.Tensor:
        ctx.rank = axis.rank
        return forward(ctx, axis, part)

    exchange._TotalLoss.forward = staticmethod(remembering)  # type: ignore[method-assign, assignment]
    exchange._TotalLoss.backward = staticmethod(backward)  # type: ignore[method-assign, assignment]


def _handed_back() -> None:
    """The gradient that a stage hands back is a tenth too large."""
    original = ScheduleRun._take

    def take(self: Any, action: Any) -> Any:
        graph, gradients = original(self, action)
        return graph, [None if each is None else each * 1.1 for each in gradients]

    ScheduleRun._take = take  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    "Routes": _routes,
    "Rows": _rows,
    "SharedExperts": functools.partial(_not_averaged, "edp"),
    "Replicas": functools.partial(_not_averaged, "dp_replicate"),
    "Shards": functools.partial(_not_averaged, "shard"),
    "Sequences": _parts_of_the_loss,
    "HandedBack": _handed_back,
}
"""Name of the fault -> plants it; `RoutesMoe` is the class of a mixture of experts with it, `RoutesLlama` a dense one."""


def _broken(base: Any, name: str) -> Any:
    class Broken(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            plant = FAULTS.get(name) if "RANK" in os.environ else None
            if plant is not None and name not in _planted:
                _planted.add(name)
                plant()
            super().__init__(*args, **kwargs)

    return Broken


_planted: set[str] = set()
for _name in FAULTS:
    globals()[f"{_name}Moe"] = _broken(Qwen3MoeForCausalLM, _name)
    globals()[f"{_name}Llama"] = _broken(LlamaForCausalLM, _name)


class SlicesLlama(LlamaForCausalLM):  # a plan that is wrong is never used, because plans are verified
    """Where its matrices are cut the loss is a tenth too large."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As its base."""
        output = super().forward(*args, **kwargs)
        projection = self.model.layers[0].self_attn.q_proj
        if projection.weight.shape[0] < projection.out_features and output.loss is not None:
            output.loss = output.loss * 1.1
        return output
