"""One forward on meta that records the order of block calls, their arguments, and the parameters that each tensor depends on.

Position `p` is the number of block calls that have begun. A *source* is a number for a set of parameters that a tensor was
computed from, in execution order: 2p for modules outside the blocks that run at position p, 2k + 1 for block call k.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from hf_dist.errors import ModelError
from hf_dist.parallel.pipeline import collected
from hf_dist.parallel.pipeline.blocks import find_blocks, find_outside
from hf_dist.parallel.pipeline.intercept import intercept
from hf_dist.parallel.pipeline.meta import RANDOM, MetaTrace, meta_twin, on_meta, to_meta
from hf_dist.parallel.pipeline.partition import BlockCosts

__all__ = ["Argument", "BlockCall", "Probe", "SameAs", "TensorSpec", "is_leaf", "probe"]


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and `requires_grad` of a tensor, for the batch of the probe."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """The spec of `tensor`."""
        return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def __str__(self) -> str:
        return f"{in_words(self.shape, self.dtype)}{'' if self.requires_grad else ' without gradient'}"


def in_words(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """`2x7 float32`."""
    return f"{'x'.join(map(str, shape)) or 'one'} {str(dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Argument:
    """A tensor among the arguments of a block call."""

    index: int
    """Position among the leaves of (args, kwargs)."""
    path: str
    """The position in readable form: `[1]['position_bias']`."""
    value: int
    """Number of the tensor; equal for arguments that are the same tensor object."""
    spec: TensorSpec
    sources: frozenset[int]
    """Its sources (see the module docstring); `RANDOM` for a random draw."""


@dataclass(frozen=True)
class SameAs:
    """In the template of a result: a value like the argument at `index`, or an unknown tensor if `index` is None."""

    index: int | None


@dataclass(frozen=True)
class BlockCall:
    """One call of a block, as the probe saw it."""

    module: str
    """Path of the block."""
    leaves: tuple[str, ...]
    """Paths of the leaves of (args, kwargs), tensors or not."""
    arguments: tuple[Argument, ...]
    result: object
    """Its result, with each tensor replaced by `SameAs`."""
    collected: tuple[tuple[str, int], ...]
    """Tensors that HF had collected when the call began: (name of the list, its length)."""
    collected_specs: tuple[TensorSpec, ...]

    @cached_property
    def values(self) -> frozenset[int]:
        """Numbers of its argument tensors."""
        return frozenset(argument.value for argument in self.arguments)


@dataclass(frozen=True)
class Probe:
    """The record of one forward of a model."""

    calls: tuple[BlockCall, ...]
    blocks: frozenset[str]
    """Paths of all blocks, called or not."""
    outside: frozenset[str]
    """Paths of the modules with parameters outside the blocks."""
    params: tuple[tuple[str, ...], ...]
    """All names of each parameter; the first is the name in `named_parameters`."""
    positions: dict[str, frozenset[int]]
    """First name -> sources (see the module docstring) at which the parameter's own module read it."""
    loose_reads: dict[str, frozenset[int]]
    """First name -> positions at which code around the modules read the parameter."""
    flops: tuple[int, ...]
    """Floating-point operations of the forward, by source."""
    numel: tuple[int, ...]
    """Numbers of parameters, by the source that read them first."""
    classes: tuple[str, ...]
    """Class name of the block of each call."""

    def costs(self, recompute: bool = False) -> BlockCosts:
        """Costs for `partition`. A backward costs two forwards; `recompute` (activation checkpointing) adds one per block."""
        around = self.flops[0::2]
        scale = 4.0 if recompute else 3.0
        blocks = [scale * f + 3.0 * extra for f, extra in zip(self.flops[1::2], [0, *around[1:-1]], strict=True)]
        params = [n + extra for n, extra in zip(self.numel[1::2], [0, *self.numel[2:-1:2]], strict=True)]
        if not any(blocks):
            blocks = list(map(float, params))
        return BlockCosts(
            tuple(blocks), 3.0 * around[0], 3.0 * around[-1], tuple(params), self.numel[0], self.numel[-1], self.classes
        )


def is_leaf(value: object) -> bool:
    """Whether `value` is a leaf: caches and other objects are; plain containers and HF's outputs (dicts) are not."""
    return not isinstance(value, tuple | list | dict)


def probe(
    model: nn.Module,
    batch: Mapping[str, object],
    run: Callable[[nn.Module, Any], object] | None = None,
    *,
    real: bool = False,
) -> Probe:
    """Run `model` once on meta with tensors like those of `batch`. Local; allocates nothing and leaves `model` unchanged.

    `batch` must have the keys of training batches. `run(model, batch)`: how the model is called, `model(**batch)` by default.
    `real`: run a copy with memory instead, for a model that does not run on meta. Raises `ModelError` if the model has no
    blocks or cannot run.
    """
    twin = meta_twin(model, real=real)
    recorder = _Recorder(twin, real)
    try:
        with on_meta(recorder.trace):
            (run or (lambda m, b: m(**b)))(twin, to_meta(batch, real=real))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot be split: its forward does not run without memory (device 'meta'), which is how "
            f"its blocks are found: {type(error).__name__}: {error}"
        ) from error
    if not recorder.calls:
        raise ModelError(
            f"{type(model).__name__} cannot be split: none of its modules repeats (a list of blocks), or none was called"
        )
    return recorder.result()


class _Recorder:
    """Records the probe's forward."""

    def __init__(self, twin: nn.Module, real: bool) -> None:
        self.blocks = find_blocks(twin)
        self.outside = find_outside(twin, self.blocks)
        self.calls: list[BlockCall] = []
        self.position = 0
        self.names: dict[int, list[str]] = defaultdict(list)
        self.numels: dict[str, int] = {}
        for name, param in twin.named_parameters(remove_duplicate=False):
            self.names[id(param)].append(name)
            self.numels[self.names[id(param)][0]] = param.numel()
        self.reads: dict[str, set[int]] = defaultdict(set)
        self.loose: dict[str, set[int]] = defaultdict(set)
        self.flops: dict[int, int] = defaultdict(int)
        self._stack: list[tuple[int, frozenset[int]]] = []
        self._values: dict[int, int] = {}
        self._alive: list[object] = []
        self.trace = MetaTrace(
            list(twin.parameters()),
            read=self._read,
            decide=lambda sources: None,
            drawn=lambda: frozenset({RANDOM}),
            real=real,
        )
        for path, module in self.blocks.items():
            intercept(module, self._watch(path, module, is_block=True))
        for path, module in self.outside.items():
            intercept(module, self._watch(path, module, is_block=False))

    def _read(self, param: nn.Parameter) -> frozenset[int]:
        name = self.names[id(param)][0]
        if self._stack and id(param) in self._stack[-1][1]:
            source = self._stack[-1][0]
            self.reads[name].add(source)
            return frozenset({source})
        self.loose[name].add(self.position)
        return frozenset()

    def _watch(self, path: str, module: nn.Module, is_block: bool) -> Callable[..., object]:
        holds = frozenset(id(p) for p in module.parameters())

        def handler(call: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            if self._stack:  # inside another block or module: not a place to cut
                return call(*args, **kwargs)
            before = collected.flatten()
            source = 2 * self.position + 1 if is_block else 2 * self.position
            self.position += is_block
            self._stack.append((source, holds))
            flops = self.trace.flops
            try:
                result = call(*args, **kwargs)
            finally:
                self._stack.pop()
            self.flops[source] += self.trace.flops - flops
            self._mark((args, kwargs), result, source)
            if is_block:
                self._record(path, (args, kwargs), result, before)
            return result

        return handler

    def _mark(self, inputs: object, result: object, source: int) -> None:
        """Mark a module's new tensors with its source, even if no parameter went into them (T5's empty position bias)."""
        storages = {t.untyped_storage()._cdata for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in storages:
                self.trace.mark(leaf, frozenset({source}))

    def _record(self, path: str, inputs: object, result: object, before: Any) -> None:
        leaves = tree_flatten_with_path(inputs, is_leaf=is_leaf)[0]
        arguments = [
            Argument(i, keystr(where), self._number(leaf), TensorSpec.of(leaf), self.trace.sources(leaf))
            for i, (where, leaf) in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
        ]
        self._alive.append(inputs)

        def template(leaf: object) -> object:
            if isinstance(leaf, torch.Tensor):
                like = [a.index for a in arguments if (a.spec.shape, a.spec.dtype) == (tuple(leaf.shape), leaf.dtype)]
                return SameAs(like[0] if like else None)
            same = [i for i, (_, argument) in enumerate(leaves) if argument is leaf and leaf is not None]
            return SameAs(same[0]) if same else leaf

        layout, tensors = before
        self.calls.append(
            BlockCall(
                module=path,
                leaves=tuple(keystr(where) for where, _ in leaves),
                arguments=tuple(arguments),
                result=tree_map(template, result, is_leaf=is_leaf),
                collected=layout,
                collected_specs=tuple(map(TensorSpec.of, tensors)),
            )
        )

    def _number(self, tensor: torch.Tensor) -> int:
        return self._values.setdefault(id(tensor), len(self._values))

    def result(self) -> Probe:
        count = 2 * len(self.calls) + 1
        numel = [0] * count
        for name, size in self.numels.items():
            sources = self.reads.get(name) or {2 * p for p in self.loose.get(name, ())}
            if sources:
                numel[min(sources)] += size
        return Probe(
            calls=tuple(self.calls),
            blocks=frozenset(self.blocks),
            outside=frozenset(self.outside),
            params=tuple(map(tuple, self.names.values())),
            positions={name: frozenset(sources) for name, sources in self.reads.items()},
            loose_reads={name: frozenset(positions) for name, positions in self.loose.items()},
            flops=tuple(self.flops[source] for source in range(count)),
            numel=tuple(numel),
            classes=tuple(type(self.blocks[call.module]).__name__ for call in self.calls),
        )
