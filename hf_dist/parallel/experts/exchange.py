"""The forward of experts that are spread over ranks: sends tokens to their experts, and sends the results back.

Dropless: every token reaches every expert that its router chose, whatever the load, so the numbers equal those of one
process. The class's own forward runs on the rows that arrive, each with one expert. The experts' ranks apply the weights
and sum in fp32.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis
from hf_dist.memory.activation.tape import kept
from hf_dist.parallel.experts.routing_plan import (
    RoutingPlan,
    even_plan,
    packed_counts,
    pairs_of,
    rows_to_send,
    unpacked,
)
from hf_dist.tensors import host_read

__all__ = ["EvenExchange", "ExpertExchange"]


class _Swap(torch.autograd.Function):
    """Sends rows of several tensors to the ranks of an axis; backward sends their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, axis: MeshAxis, sent: list[int], received: list[int], *rows: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """`rows` are sorted by target rank; returns the received rows of each tensor, sorted by source rank."""
        ctx.way = axis, received, sent
        return _swapped(axis, sent, received, *rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The same exchange in reverse, of the gradients that are needed."""
        needed = ctx.needs_input_grad[3:]
        back = iter(_swapped(*ctx.way, *(grad for grad, wanted in zip(grads, needed, strict=True) if wanted)))
        return (None, None, None, *(next(back) if wanted else None for wanted in needed))


def _swapped(axis: MeshAxis, sent: list[int], received: list[int], *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    outs = tuple(tensor.new_empty((sum(received), *tensor.shape[1:])) for tensor in rows)
    given = [tensor.contiguous() for tensor in rows]  # kept alive until the wait
    # All start before the first is waited for: the ranks meet once.
    for handle in [collectives.all_to_all(axis, *pair, sent, received) for pair in zip(given, outs, strict=True)]:
        handle.wait()
    return outs


class ExpertExchange:
    """Replaces the `forward` of one experts module, which it holds weakly."""

    def __init__(self, experts: nn.Module, axis: MeshAxis, num_local: int) -> None:
        """`axis`: the ranks over which the experts are spread; `num_local`: experts per rank."""
        self._experts = weakref.ref(experts)
        self.axis = axis
        self.num_local = num_local
        self.load: torch.Tensor | None = None
        """(num_local): rows of training that each local expert had since the last `take_load`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Copied:
        return _Copied(memo[id(self._experts())])

    def __call__(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The result of the module's own forward for `hidden` (tokens, features), `chosen` and `weights` (tokens, k).

        Collective over the axis, also in backward. Ranks may have different numbers of tokens.
        """
        return self._run(hidden, chosen, weights)

    @torch.compiler.disable
    def _run(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        chosen, weights = (x.reshape(len(tokens), x.shape[-1]) for x in (chosen, weights))
        plan = kept(lambda: self._plan(chosen))
        mine = tokens.index_select(0, plan.token), weights.float().index_select(0, plan.token)
        rows, share = self._swap(plan.sent, plan.received, *mine)
        made = self._compute(rows.index_select(0, plan.row), plan.expert)
        made = made * share[plan.row, plan.choice].unsqueeze(-1)
        summed = rows.new_zeros(rows.shape, dtype=torch.float32).index_add(0, plan.row, made.float())
        (back,) = self._swap(plan.received, plan.sent, summed.to(hidden.dtype))
        out = tokens.new_zeros(tokens.shape, dtype=torch.float32).index_add(0, plan.token, back.float())
        return out.to(hidden.dtype).view(hidden.shape)

    def _swap(self, sent: list[int], received: list[int], *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        swapped: tuple[torch.Tensor, ...] = _Swap.apply(self.axis, sent, received, *rows)
        return swapped

    @torch.no_grad()
    def _plan(self, chosen: torch.Tensor) -> RoutingPlan:
        size = self.axis.size
        needed, sent = packed_counts(chosen, self.num_local, size)
        received = torch.empty_like(sent)
        collectives.all_to_all(self.axis, sent, received, [1] * size, [1] * size).wait()
        to, of = map(unpacked, host_read.on_host(torch.stack((sent, received))).tolist())  # the only wait
        token = rows_to_send(needed, sum(to.rows))
        (ids,) = _swapped(self.axis, to.rows, of.rows, chosen.to(torch.int32).index_select(0, token))
        row, choice, expert = pairs_of(ids.long(), self.axis.rank, self.num_local, sum(of.pairs))
        experts = self._experts()
        if experts is not None and experts.training:
            if self.load is None:
                self.load = expert.new_zeros(self.num_local)
            self.load = self.load.index_add(0, expert, torch.ones_like(expert))  # bincount would make the host wait
        return RoutingPlan(token, to.rows, of.rows, row, choice, expert)

    def take_load(self) -> torch.Tensor | None:
        """Return `load` and start to count anew. Local."""
        load, self.load = self.load, None
        return load

    def _compute(self, rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """Run each row through its expert, with weight one."""
        experts = self._experts()
        assert experts is not None
        count = len(rows)
        if count == 0:
            # A row of zeros for the first expert gives every local weight a zero gradient. A weight without a gradient would be
            # complete only at the end of backward, so its reduction would come after the exchanges in which the others wait.
            rows, expert = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), expert.new_zeros(1)
        ones = rows.new_ones((len(rows), 1))
        made: torch.Tensor = type(experts).forward(experts, rows, expert.unsqueeze(1), ones)
        return made[:count]


class _Copied:
    """The exchange in the planner's copy of the module on meta. Other copies of prepared models are refused (`pickled.py`)."""

    def __init__(self, experts: nn.Module) -> None:
        self._experts = weakref.ref(experts)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Copied:
        return _Copied(memo[id(self._experts())])

    def __call__(self, hidden: torch.Tensor, *args: object) -> object:
        experts = self._experts()
        assert experts is not None and hidden.is_meta
        return type(experts).forward(experts, hidden, *args)


class EvenExchange(ExpertExchange):
    """The exchange of a model on meta, for plans: every expert is chosen equally often, and nothing is sent."""

    def __init__(self, experts: nn.Module, ranks: int) -> None:
        super().__init__(experts, MeshAxis("ep", ranks, 0, None), num_local=0)

    def _plan(self, chosen: torch.Tensor) -> RoutingPlan:
        return even_plan(chosen, self.axis.size)

    def _swap(self, sent: list[int], received: list[int], *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.clone() for tensor in rows)  # as many arrive
