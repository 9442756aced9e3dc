"""The forward of experts that are spread over ranks: tokens travel to the experts, and what these make of them comes back.

Dropless: every token reaches every expert that its router chose, whatever the load, so the numbers are those of one process.
The class's own forward runs on the rows that arrive, each with one expert; weights are applied here, where the experts are,
and the sum over them is made in fp32.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from hf_dist import collectives
from hf_dist.activation.tape import kept
from hf_dist.errors import ModelError
from hf_dist.experts.routing_plan import RoutingPlan, pairs_of, rows_to_send
from hf_dist.mesh import MeshAxis

__all__ = ["ExpertExchange"]


class _Swap(torch.autograd.Function):
    """Rows to the ranks of an axis; their gradients take the way back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, axis: MeshAxis, sent: list[int], received: list[int]) -> torch.Tensor:
        """Rows of every rank, by rank."""
        ctx.way = axis, received, sent
        return _swapped(rows, axis, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The same, the other way round."""
        return _swapped(grads[0], *ctx.way), None, None, None


def _swapped(rows: torch.Tensor, axis: MeshAxis, sent: list[int], received: list[int]) -> torch.Tensor:
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    collectives.all_to_all(axis, rows.contiguous(), out, sent, received).wait()
    return out


class ExpertExchange:
    """Stands for the `forward` of one module of experts, which it holds weakly."""

    def __init__(self, experts: nn.Module, axis: MeshAxis, num_local: int) -> None:
        """`axis`: the ranks that the experts are spread over, `num_local` on each."""
        self._experts = weakref.ref(experts)
        self.axis = axis
        self.num_local = num_local
        self.load: torch.Tensor | None = None
        """(num_local): rows that each expert here had since somebody asked (`take_load`)."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Copied:
        return _Copied(memo[id(self._experts())])

    def __call__(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What the module's own forward gives: (tokens, features) of `hidden`, `chosen` and `weights` (tokens, k).

        Collective over the axis, in backward too; ranks may have different numbers of tokens.
        """
        return self._run(hidden, chosen, weights)

    @torch.compiler.disable
    def _run(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        chosen, weights = chosen.reshape(len(tokens), -1), weights.reshape(len(tokens), -1)
        plan = kept(lambda: self._plan(chosen))
        rows = _Swap.apply(tokens.index_select(0, plan.token), self.axis, plan.sent, plan.received)
        share = _Swap.apply(weights.float().index_select(0, plan.token), self.axis, plan.sent, plan.received)
        made = self._compute(rows.index_select(0, plan.row), plan.expert)
        made = made * share[plan.row, plan.choice].unsqueeze(-1)
        summed = rows.new_zeros(rows.shape, dtype=torch.float32).index_add(0, plan.row, made.float())
        back = _Swap.apply(summed.to(hidden.dtype), self.axis, plan.received, plan.sent)
        out = tokens.new_zeros(tokens.shape, dtype=torch.float32).index_add(0, plan.token, back.float())
        return out.to(hidden.dtype).view(hidden.shape)

    @torch.no_grad()
    def _plan(self, chosen: torch.Tensor) -> RoutingPlan:
        token, sent = rows_to_send(chosen, self.num_local, self.axis.size)
        received = torch.empty_like(sent)
        collectives.all_to_all(self.axis, sent, received, [1] * self.axis.size, [1] * self.axis.size).wait()
        to, of = torch.stack((sent, received)).tolist()  # the one moment at which the host waits
        ids = _swapped(chosen.to(torch.int32).index_select(0, token), self.axis, to, of).long()
        row, choice, expert = pairs_of(ids, self.axis.rank, self.num_local)
        load = torch.bincount(expert, minlength=self.num_local)
        self.load = load if self.load is None else self.load + load
        return RoutingPlan(token, to, of, row, choice, expert)

    def take_load(self) -> torch.Tensor | None:
        """`load`, counted anew from here. Local."""
        load, self.load = self.load, None
        return load

    def _compute(self, rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """Each row by its expert, with weight one."""
        experts = self._experts()
        assert experts is not None
        count = len(rows)
        if count == 0:
            # A row of zeros for the first expert: every weight here gets a gradient, zero. One without any would be complete
            # only at the end of backward, and its reduction would come after the exchanges that the others wait in.
            rows, expert = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), expert.new_zeros(1)
        ones = rows.new_ones((len(rows), 1))
        made: torch.Tensor = type(experts).forward(experts, rows, expert.unsqueeze(1), ones)
        return made[:count]


class _Copied:
    """The same on a copy of the module: it has this rank's experts only. On meta, where plans are made, that is enough."""

    def __init__(self, experts: nn.Module) -> None:
        self._experts = weakref.ref(experts)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Copied:
        return _Copied(memo[id(self._experts())])

    def __call__(self, hidden: torch.Tensor, *args: Any) -> Any:
        experts = self._experts()
        assert experts is not None
        if not hidden.is_meta:
            raise ModelError(
                f"a copy of an expert-parallel model has the experts of one rank ({type(experts).__name__}) and cannot run. "
                "Save the model and load it for another one, or copy it before it is prepared."
            )
        return type(experts).forward(experts, hidden, *args)
