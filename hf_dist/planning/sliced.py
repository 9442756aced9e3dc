"""A model as one rank of `tp` holds it, on meta: slices in place, and crossings that are counted instead of sent.

The plan and the split use the same code as a job (`parallel/tensor_on_shards.py`). Forward crossings are counted as they run,
for the block in which they run; backward crossings are read from autograd's graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_dist.config import DistConfig
from hf_dist.parallel.pipeline.meta import meta_twin
from hf_dist.parallel.tensor.peers import AtOnce
from hf_dist.parallel.tensor.plan import SplitPlan, output_and_input, unwrapped
from hf_dist.parallel.tensor.split import SplitModel
from hf_dist.parallel.tensor_on_shards import keep_along_tp, kinds_of_copies, plan_of
from hf_dist.sharding.units import find_unit_modules

__all__ = ["Crossed", "EarlySum", "MetaPeers", "Sliced", "add", "crossed_backward", "merged", "sliced"]

Crossed = dict[str, tuple[int, int]]
"""(number, bytes that one rank sends) by operation, as `hf_dist.dist.comm_counter` counts them."""


class EarlySum(NamedTuple):
    """The sum of an input's gradient, and what can be computed meanwhile."""

    nbytes: int
    """Bytes that one rank sends."""
    flops: int
    """Operations of the weight gradients of all products that read the input."""


def add(crossed: Crossed, op: str, nbytes: int, count: int = 1) -> None:
    """Add one collective, or `count` collectives of `nbytes` in total."""
    calls, total = crossed.get(op, (0, 0))
    crossed[op] = calls + count, total + nbytes


def merged(*parts: Crossed) -> Crossed:
    """The sum of all parts."""
    found: Crossed = {}
    for part in parts:
        for op, (count, nbytes) in part.items():
            add(found, op, nbytes, count)
    return found


class MetaPeers(AtOnce):
    """Peers for ranks that do not exist. See `tensor_parallel.peers.Peers`."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, size - 1  # the last rank has the largest part if sizes do not divide
        self.crossed: Crossed = {}
        """Counts the collectives of the running block."""
        self.early: list[EarlySum] = []
        """Sums of the running block that may begin early."""
        self._read: weakref.ref[torch.Tensor] | None = None
        """Not the tensor: its graph holds these peers, so neither would ever be freed."""
        self.cuts_vocabulary = False
        """Whether each rank holds only some columns of the logits."""

    def reads(self, product: nn.Module, tensor: torch.Tensor, *, is_region: bool) -> None:
        """A product by columns reads `tensor`, whose gradient is a sum over the ranks."""
        rows: Any = product.weight
        flops = 2 * tensor.numel() * rows.shape[0]
        if self._read is not None and tensor is self._read():
            self.early[-1] = EarlySum(self.early[-1].nbytes, self.early[-1].flops + flops)
        elif tensor.requires_grad:
            self._read = weakref.ref(tensor)
            sent = (1 if is_region else 2) * (self.size - 1) * _nbytes(tensor) // self.size
            self.early.append(EarlySum(sent, flops))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce."""
        add(self.crossed, "all_reduce", 2 * (self.size - 1) * _nbytes(tensor) // self.size)
        return torch.empty_like(tensor.detach(), memory_format=torch.contiguous_format)

    max = sum

    def parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """All-gather."""
        add(self.crossed, "all_gather", (self.size - 1) * _nbytes(tensor))
        return [tensor.detach()] * self.size

    def scatter_sum(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Reduce-scatter."""
        add(self.crossed, "reduce_scatter", (self.size - 1) * _nbytes(tensor) // self.size)
        return tensor.detach().chunk(self.size, dim)[self.rank].contiguous()


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class Sliced:
    """What one rank holds."""

    model: nn.Module
    """The model on meta."""
    plan: SplitPlan
    size: int
    copies: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Parameters that other ranks also hold: how their gradients are combined, over how many neighbours (0: all)."""

    def cut(self, model: nn.Module) -> MetaPeers:
        """Split a whole meta model the same way, to run it. Its head returns its own columns of the logits, for the loss."""
        return _cut(model, self.plan, self.size)[1]


def sliced(model: nn.Module, config: DistConfig, *, spread: bool = False, in_place: bool = False) -> Sliced:
    """`model` (real or on meta) as the last rank of `tensor_parallel.autotp_size` holds it. Raises `ModelError`.

    `spread`: its experts are spread over ranks instead of split; `in_place`: as in `plan_of`.
    """
    size = config.tensor_parallel.autotp_size
    plan = plan_of(model, config, size, spread=spread, in_place=in_place)
    twin = meta_twin(model)
    split, _ = _cut(twin, plan, size)
    return Sliced(twin, plan, size, kinds_of_copies(split, [name for name, _ in twin.named_parameters()]))


def _cut(model: nn.Module, plan: SplitPlan, size: int) -> tuple[SplitModel, MetaPeers]:
    peers = MetaPeers(size)
    _, head = output_and_input(unwrapped(model)[0])
    before = set(head._forward_hooks) if head is not None else set()
    split = SplitModel(model, plan, peers, keep=keep_along_tp, blocks=find_unit_modules(model))
    peers.cuts_vocabulary = split.vocabulary is not None
    modules = dict(unwrapped(model)[0].named_modules())
    early = split.products_together(modules)
    for name, module in modules.items():
        if id(module) in early:
            inside = split.regions.contains(name) or name in split.regions.products
            count = partial(_count_early, peers=peers, is_region=inside)
            module.register_forward_hook(count)
    if head is not None and peers.cuts_vocabulary:
        for key in set(head._forward_hooks) - before:
            del head._forward_hooks[key]
    return split, peers


def _count_early(module: nn.Module, args: Any, output: object, *, peers: MetaPeers, is_region: bool) -> None:
    peers.reads(module, args[0], is_region=is_region)


def crossed_backward(outputs: object) -> Crossed:
    """Collectives of a backward from `outputs`, which is not run: every crossing in autograd's graph, reversed."""
    found: Crossed = {}
    for node in _nodes(outputs):
        peers = getattr(node, "peers", None)
        if isinstance(peers, MetaPeers):
            like = node._input_metadata[0]
            kept, peers.crossed = peers.crossed, found
            node.back(peers, torch.empty(like.shape, dtype=like.dtype, device="meta"), node.shape, node.extra)
            peers.crossed = kept
    return found


def _nodes(outputs: Any) -> Iterator[Any]:
    left = [t.grad_fn for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen = set(left)
    while left:
        node = left.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)
