"""Backward of one stage, whole or in two parts: the gradient of its received tensors, and later that of its weights.

[Note: splitting a backward] Some nodes on the path from the outputs to the received tensors also lead to a weight (the `mm`
of a linear layer, the product with a norm's weight). At such a node, `I` computes only the gradient towards the received
tensors and keeps the node's incoming gradient; `W` runs the node again, only towards the weight. Each matrix product of a
linear layer is computed once. The gradient of a weight that several such nodes lead to is computed in `I`, not deferred.
(Qi et al. 2023, section 5; torch's `distributed/pipelining/_backward.py` cuts at the same nodes.)
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["StageGraph"]


class StageGraph:
    """The autograd graph of one microbatch through one stage; holds no activation that autograd does not need."""

    def __init__(self, received: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """`received`: leaf tensors; `outputs`: tensors that the stage sends, or its loss; those without grad are ignored."""
        self.received = list(received)
        self._edges = [get_gradient_edge(t) if t.requires_grad else None for t in outputs]
        self._later: list[_Later] | None = None

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Run the whole backward. `gradients`: one per output; None means 1 (a loss) or an output without grad."""
        roots, arrived = self._roots(gradients)
        self._edges = []
        if roots:
            torch.autograd.backward(roots, arrived)

    def backward_input(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Fill `grad` of the received tensors, and keep the inputs of `backward_weight`."""
        roots, arrived = self._roots(gradients)
        self._edges = []
        inputs = [t for t in self.received if t.requires_grad]
        plan = _Cut(roots, inputs)
        pairs = list(zip(roots, arrived, strict=True))
        off = _Later([(e, g) for e, g in pairs if e.node not in plan.on_way], plan.off_way)
        self._later = [off]
        now = [(e, g) for e, g in pairs if e.node in plan.on_way]
        if not now:
            return
        kept = {node: _Later([], weights) for node, weights in plan.beside.items()}
        handles = [node.register_prehook(functools.partial(later.keep, node)) for node, later in kept.items()]
        torch.autograd.backward(
            [e for e, _ in now], [g for _, g in now], inputs=[*inputs, *plan.shared], retain_graph=True
        )
        for handle in handles:
            handle.remove()
        self._later += kept.values()

    def backward_weight(self) -> None:
        """Add the weight gradients that `backward_input` deferred to `grad` of the weights."""
        assert self._later is not None, "backward_input comes first"
        for later in self._later:
            later.run()
        self._later = None

    def gradients(self) -> list[torch.Tensor]:
        """`grad` of each received tensor that requires it, for the previous stage; zeros if no gradient arrived."""
        return [torch.zeros_like(t) if t.grad is None else t.grad for t in self.received if t.requires_grad]

    def _roots(self, gradients: Sequence[torch.Tensor | None]) -> tuple[list[GradientEdge], list[torch.Tensor | None]]:
        pairs = [(edge, g) for edge, g in zip(self._edges, gradients, strict=True) if edge is not None]
        return [edge for edge, _ in pairs], [g for _, g in pairs]


class _Later:
    """A deferred part of a backward: its starting edges with gradients, and the weights to reach."""

    def __init__(self, arrived: list[tuple[GradientEdge, torch.Tensor | None]], weights: list[torch.Tensor]) -> None:
        self.arrived = arrived
        self.weights = weights

    def keep(self, node: Node, grad_outputs: Any) -> None:
        """Prehook of a node that leads to the weights: keeps its incoming gradients."""
        self.arrived = [(GradientEdge(node, i), g) for i, g in enumerate(grad_outputs) if g is not None]

    def run(self) -> None:
        """Compute the gradients of the weights."""
        if self.arrived and self.weights:
            edges, grads = zip(*self.arrived, strict=True)
            torch.autograd.backward(list(edges), list(grads), inputs=self.weights)


class _Cut:
    """Finds the nodes on the path to the received tensors that also lead to weights."""

    def __init__(self, roots: list[GradientEdge], inputs: list[torch.Tensor]) -> None:
        targets = {get_gradient_edge(t).node for t in inputs}
        order = _postorder([edge.node for edge in roots])
        on_way: set[Node] = set()
        below: dict[Node, dict[int, torch.Tensor]] = {}  # weights that a node off the path leads to
        found: dict[Node, dict[int, torch.Tensor]] = {}
        for node in order:
            children = [child for child, _ in node.next_functions if child is not None]
            if node in targets or any(child in on_way for child in children):
                on_way.add(node)
                beside = {k: v for child in children if child not in on_way for k, v in below[child].items()}
                if beside:
                    found[node] = beside
            else:
                variable = getattr(node, "variable", None)
                own = {} if variable is None else {id(variable): variable}
                below[node] = own | {k: v for child in children for k, v in below[child].items()}
        # Outputs off the path have separate graphs, which may overlap: run them together.
        off_way = {k: v for edge in roots if edge.node not in on_way for k, v in below[edge.node].items()}
        counts = Counter(key for weights in (*found.values(), off_way) for key in weights)
        # Running a node towards a weight that another, deeper node also leads to would run through that deeper node.
        shared = {k: v for weights in found.values() for k, v in weights.items() if counts[k] > 1}
        self.on_way = on_way
        self.shared = list(shared.values())
        self.beside = {n: [v for k, v in w.items() if k not in shared] for n, w in found.items()}
        self.off_way = list(off_way.values())


def _postorder(roots: list[Node]) -> list[Node]:
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return order
