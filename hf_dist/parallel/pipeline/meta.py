"""Runs a model without its elements and traces what every tensor was computed from."""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from hf_dist.tensors import pytree

__all__ = ["PRODUCTS", "RANDOM", "MetaTrace", "grouped_flops", "meta_twin", "on_meta", "to_meta"]

RANDOM = -1
"""The source of a tensor that was drawn at random: another process draws different values."""

aten = torch.ops.aten

PRODUCTS = frozenset({*flop_registry, aten._grouped_mm})
"""Operations whose floating-point operations `MetaTrace` counts. torch's counter does not know grouped products."""
_NO_VALUES = {
    *(aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_empty),
    *(aten.new_full, aten.new_empty_strided, aten.rand_like, aten.randn_like),
}
"""Operations that read only the shape of their argument."""

_ANSWERS: dict[torch.dtype, Any] = {torch.bool: False}


def meta_twin(
    module: nn.Module, *, real: bool = False, shape_of: Callable[[torch.Tensor], tuple[int, ...]] | None = None
) -> nn.Module:
    """A copy with the same structure whose tensors have no memory; keeps `requires_grad`, ties and training mode. Local.

    `real`: copy memory and elements too, for a model that does not run on meta. `shape_of`: the shape of a parameter in the
    copy, if not its own.
    """
    memo: dict[int, object] = {}
    for owner in module.modules():
        for tensor in pytree.leaves([owner._parameters, owner._buffers, list(vars(owner).values())]):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                # Made from shape and dtype, so that a lazy parameter is not read.
                twin = (
                    tensor.detach().clone()
                    if real
                    else torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                )
                is_param = isinstance(tensor, nn.Parameter)
                if is_param and shape_of is not None:
                    twin = torch.empty(shape_of(tensor), dtype=tensor.dtype, device="meta")
                memo[id(tensor)] = nn.Parameter(twin, requires_grad=tensor.requires_grad) if is_param else twin
    return copy.deepcopy(module, memo)


def to_meta(value: object, *, real: bool = False) -> Any:
    """The same tree with its tensors on meta (`real`: copies); keeps `requires_grad` but not the autograd history."""

    def convert(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        data = leaf.detach()
        return (data.clone() if real else data.to("meta")).requires_grad_(leaf.requires_grad)

    return pytree.mapped(convert, value)


@contextmanager
def on_meta(trace: MetaTrace) -> Iterator[None]:
    """Create new tensors on meta inside the block and dispatch operations to `trace`; all elements count as nonzero.

    With a `real` trace, operations compute as usual and are traced.
    """
    with ExitStack() as stack:
        if not trace.real:
            fx_config: Any = importlib.import_module("torch.fx.experimental._config")
            stack.enter_context(fx_config.patch(meta_nonzero_assume_all_nonzero=True))
            stack.enter_context(torch.device("meta"))
        stack.enter_context(trace)
        yield


class MetaTrace(TorchDispatchMode):
    """Traces sources through every operation, by storage: views share sources; an in-place operation adds sources.

    It runs below autograd, so it sees custom functions and in-place operations. A source is a small number whose meaning the
    caller defines. `read(param)` returns the sources of a parameter when it is read. `decide(sources)` is called when Python
    reads a value, which is then False, 1 or 1.0.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        *,
        read: Callable[[nn.Parameter], frozenset[int]],
        decide: Callable[[frozenset[int]], None],
        drawn: Callable[[], frozenset[int]],
        real: bool = False,
    ) -> None:
        """`drawn()`: returns the sources of a tensor drawn at random now; `real`: tensors have elements, so values are real."""
        super().__init__()
        self.real = real
        self._params = {p.untyped_storage()._cdata: p for p in params}
        self._sources: dict[int, frozenset[int]] = {}
        self._alive: list[object] = [p.untyped_storage() for p in params]  # else another storage could reuse an address
        self._read, self._decide, self._drawn = read, decide, drawn
        self.flops = 0
        """Floating-point operations so far, as torch's flop counter counts them."""

    def sources(self, tensor: torch.Tensor) -> frozenset[int]:
        """The sources that `tensor` was computed from."""
        return self._sources.get(tensor.untyped_storage()._cdata, frozenset())

    def mark(self, tensor: torch.Tensor, sources: frozenset[int]) -> torch.Tensor:
        """Add these sources to those of `tensor`, and return it."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sources:
            self._alive.append(storage)
        self._sources[storage._cdata] = self._sources.get(storage._cdata, frozenset()) | sources
        return tensor

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation; returns its result on meta, with sources."""
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        packet = func.overloadpacket
        sources = frozenset[int]() if packet in _NO_VALUES else frozenset(itertools.chain(*map(self._of, tensors)))
        if packet in (aten._local_scalar_dense, aten.equal):
            self._decide(sources)
            if self.real:
                return func(*args, **kwargs)
            answer = _ANSWERS.get(tensors[0].dtype, 1)
            return packet is not aten.equal and (float(answer) if tensors[0].is_floating_point() else answer)
        if packet is aten._to_copy and not self.real and torch.device(kwargs.get("device") or "meta").type != "meta":
            self._decide(sources)
            return self.mark(
                torch.ones(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype, device="cpu"), sources
            )
        if torch.Tag.nondeterministic_seeded in func.tags and not sources:
            sources = self._drawn()
        if packet is aten.lt and not isinstance(args[1], torch.Tensor) and args[1] <= 0 and sources == {RANDOM}:
            sources = frozenset()  # layer drop with probability 0: no draw is below 0
        if packet is aten._grouped_mm and not self.real:  # on meta it accepts only bf16
            out = _grouped_mm(*args[:2])
            self.flops += grouped_flops(*args[:2])
        else:
            out = func(*args, **kwargs)
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        if packet is aten.copy_ and out.numel() * out.itemsize == out.untyped_storage().nbytes():
            self._sources[out.untyped_storage()._cdata] = self._of(args[1])  # the old value is fully overwritten
            return out
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.mark(leaf, sources)
        return out

    def _of(self, tensor: torch.Tensor) -> frozenset[int]:
        param = self._params.get(tensor.untyped_storage()._cdata)
        return self.sources(tensor) if param is None else self.sources(tensor) | self._read(param)


def _grouped_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Empty result of a grouped product, in which a, b or the result has a group dimension."""
    rows, columns = a.shape[-2], b.shape[-1]
    grouped = a.dim() == b.dim()  # both have a group dimension, or both are concatenated and only the result has one
    groups = a.shape[0] if a.dim() == 3 else b.shape[0] if b.dim() == 3 else 1
    return a.new_empty((groups, rows, columns) if grouped else (rows, columns))


def grouped_flops(a: torch.Tensor, b: torch.Tensor) -> int:
    """Floating-point operations of a grouped product: its groups share the rows, columns or inner elements between them."""
    return 2 * a.shape[-2] * b.shape[-1] * a.shape[-1] * (a.shape[0] if a.dim() == b.dim() == 3 else 1)
