"""Blocks that keep their activations as parts of the sequence: norms, dropout and residuals work on 1/tp of the tokens.

    I -> S   before the first block          S -> R   at the start of a region: a child of a block that ends in a row product
    S -> I   after the last block            P -> S   at its end

Nothing crosses inside a region. Each rank has a part of the gradient of parameters that are whole there, or work on S. The
bytes sent are the same as without regions; activations between regions take 1/tp. Forwards without gradients use the plain
form: P -> I at the end of a region. A pipeline that cuts the model between two blocks sends S as it is, from each rank of the
split to the rank with the same part in the next stage.

[Note: lengths] A length that does not divide is padded. A region must know the true length, also when activation
checkpointing runs a block again, perhaps after forwards of other lengths. What runs inside a checkpointed call finds it on the
call's tape. Where the hooks of the block run again too, it is remembered with the tensors that the block is called with, which
are the same objects in the recomputation. A pipeline stage that begins inside the stack reads it from the whole stand-in.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hf_dist.errors import ModelError
from hf_dist.memory.activation.tape import kept
from hf_dist.parallel.tensor import tp_collectives
from hf_dist.parallel.tensor.overlap import Crossed
from hf_dist.parallel.tensor.peers import Peers
from hf_dist.parallel.tensor.plan import ROW, WHOLE_EXPERTS, pattern_of, stock_name
from hf_dist.tensors import pytree
from hf_dist.tensors.random_streams import Streams

__all__ = ["Regions", "Stack", "find_regions", "recorded_routers", "routers_in"]

_ENDS = ROW | {"moe_tp_experts", "all_reduce"}
_NEEDS_ALL = {
    "attention_mask",
    "position_embeddings",
    "past_key_values",
    "cache_params",
    "position_ids",
    "past_key_value",
}
_MOST = 256
Change = Callable[[torch.Tensor], torch.Tensor]


class Regions:
    """How a model's blocks are divided into regions: names of modules of the model without adapters."""

    def __init__(self) -> None:
        self.stacks: dict[str, list[str]] = {}
        """Module that holds the blocks -> its blocks, in order."""
        self.children: set[str] = set()
        """Children of blocks that begin with R and end with P."""
        self.products: set[str] = set()
        """Products directly under a block: each begins or ends a region."""
        self.whole: set[str] = set()
        """Children of blocks that mix tokens and are not split: they get I."""

    def contains(self, name: str) -> bool:
        """Whether a module is inside a region, so that nothing crosses at it."""
        return any(name == child or name.startswith(f"{child}.") for child in self.children)

    def has_parts(self, name: str) -> bool:
        """Whether each rank gets a part of the gradient of a parameter that is not split."""
        inside = any(name.startswith(f"{block}.") for blocks in self.stacks.values() for block in blocks)
        return inside and not any(name.startswith(f"{child}.") for child in self.whole)


def find_regions(modules: Mapping[str, nn.Module], styles: Mapping[str, str], blocks: Iterable[str]) -> Regions:
    """The regions of a model. Raises `ModelError` if a block has columns without a row product after them."""
    found = Regions()
    styled = {name: style for name in modules if (style := styles.get(pattern_of(name))) and stock_name(name) == name}
    styled = {name: style for name, style in styled.items() if style != WHOLE_EXPERTS}  # they take any state
    stacks: dict[str, list[str]] = {}
    for block in blocks:
        stacks.setdefault(block.rpartition(".")[0], []).append(block)
    for owner, members in stacks.items():
        regions: set[str] = set()
        products: set[str] = set()
        for block in members:
            children: dict[str, list[str]] = {}
            for name in styled:
                if name.startswith(f"{block}."):
                    children.setdefault(f"{block}.{name[len(block) + 1 :].split('.')[0]}", []).append(name)
            for child, names in children.items():
                if names == [child] and isinstance(getattr(modules[child], "base_layer", modules[child]), nn.Linear):
                    products.add(child)
                elif {styled[name] for name in names} & _ENDS:
                    regions.add(child)
                else:
                    raise ModelError(f"nothing adds up what the columns of {child} compute")
        if regions or products:
            found.stacks[owner] = members
            found.children |= regions
            found.products |= products
            found.whole |= {
                f"{block}.{name}"
                for block in members
                for name, child in modules[block].named_children()
                if f"{block}.{name}" not in regions | products and _mixes_tokens(child)
            }
    if not found.stacks:
        raise ModelError("no block has a region")
    return found


def recorded_routers(modules: Iterable[nn.Module]) -> dict[type, int]:
    """Router class whose logits the model collects for its auxiliary loss -> index of the collected output."""
    found: dict[type, int] = {}
    for module in modules:
        recorders: Any = getattr(module, "_can_record_outputs", None) or {}
        for key, recorder in recorders.items():
            for one in (recorder if isinstance(recorder, list | tuple) else [recorder]) if "router" in key else ():
                target = getattr(one, "target_class", one)
                if isinstance(target, type):
                    found[target] = getattr(one, "index", 0) or 0
    return found


def routers_in(child: nn.Module, recorded: Mapping[type, int]) -> list[tuple[nn.Module, int]]:
    """The routers of a region, each with the index of the collected output."""
    return [(module, recorded[type(module)]) for module in child.modules() if type(module) in recorded]


def _mixes_tokens(child: nn.Module) -> bool:
    """Whether the module takes masks, positions or a cache, and so needs all tokens."""
    return bool(_NEEDS_ALL & set(inspect.signature(type(child).forward).parameters))


class Stack:
    """One list of blocks: its crossings, and the sequence length in each call."""

    def __init__(self, peers: Peers, is_whole: Callable[[], bool], streams: Streams | None = None) -> None:
        """`is_whole`: whether parameters are temporarily whole, so that nothing crosses; `streams`: for dropout."""
        self.peers = peers
        self._streams = streams
        self.is_whole = is_whole
        self._length = 0  # of the running forward
        self._depth = 0  # running forwards of the module that calls the blocks
        self._plain = False  # whether this forward has no gradients
        self._known: dict[int, tuple[Any, int]] = {}
        self._products: dict[int, list[weakref.ref[nn.Module]]] = {}
        self._crossed: Crossed | None = None  # of the current region

    def install(self, caller: nn.Module, blocks: list[nn.Module]) -> None:
        """Put the crossings around the first and the last block. `caller`: the module whose forward calls them."""
        caller.register_forward_pre_hook(self._enter, prepend=True)
        caller.register_forward_hook(self._leave, always_call=True)
        blocks[0].register_forward_pre_hook(self._begin, with_kwargs=True)
        for block in blocks[1:]:
            block.register_forward_pre_hook(self._next, with_kwargs=True)
        blocks[-1].register_forward_hook(self._end, prepend=True)

    def region(self, child: nn.Module) -> None:
        """S -> R before `child`, P -> S after it."""
        self.begins(child)
        self.ends(child)

    def begins(self, child: nn.Module) -> None:
        """S -> R before `child`."""
        child.register_forward_pre_hook(
            lambda module, args, kwargs: None if self.off else _first(args, kwargs, lambda x: self._entered(x, module)),
            with_kwargs=True,
        )

    def ends(self, child: nn.Module) -> None:
        """P -> S after `child`."""
        child.register_forward_hook(
            lambda module, args, output: (
                None if self.is_whole() else _changed(output, lambda x: self._left(x, module.training))
            ),
            prepend=True,
        )

    def whole(self, child: nn.Module) -> None:
        """`child` sees all tokens: S -> I before it, I -> S after it."""

        def join(x: torch.Tensor) -> torch.Tensor:
            self._same_tokens()
            return tp_collectives.whole_sequence(x, self.peers, self.length)

        def split(x: torch.Tensor, training: bool) -> torch.Tensor:
            self._own_tokens(training=training)
            return tp_collectives.to_rows_of_sequence(x, self.peers, self.length)

        child.register_forward_pre_hook(
            lambda module, args, kwargs: None if self.off else _first(args, kwargs, join), with_kwargs=True
        )
        child.register_forward_hook(
            lambda module, args, output: None if self.off else _changed(output, lambda x: split(x, module.training)),
            prepend=True,
        )

    def equal_gradient(self, router: nn.Module, index: int) -> None:
        """R -> I for output `index` of a module in a region: the recorded value leaves the region without being summed."""

        def hook(module: nn.Module, args: object, output: object) -> object:
            if self.is_whole():
                return None
            if not isinstance(output, tuple):
                return tp_collectives.to_equal_gradient(output, self.peers)
            return tuple(
                tp_collectives.to_equal_gradient(t, self.peers) if i == index else t for i, t in enumerate(output)
            )

        router.register_forward_hook(hook, prepend=True)

    def whole_rows(self, router: nn.Module, index: int) -> None:
        """S -> I for output `index`, (tokens, experts), of a module between regions: the recorded value covers all tokens."""

        def join(logits: torch.Tensor) -> torch.Tensor:
            here = -(-self.length // self.peers.size)
            rows = logits.reshape(-1, here, logits.shape[-1])
            return tp_collectives.whole_sequence(rows, self.peers, self.length).reshape(
                *_joined_shape(logits, rows, self.length)
            )

        def hook(module: nn.Module, args: object, output: Any) -> object:
            if self.off:
                return None
            if not isinstance(output, tuple):
                return join(output)
            return tuple(join(t) if i == index else t for i, t in enumerate(output))

        router.register_forward_hook(hook, prepend=True)

    @property
    def length(self) -> int:
        """The true length of the sequences of the running block. See [Note: lengths]."""
        return kept(lambda: self._length)

    @property
    def off(self) -> bool:
        """Whether activations are I between regions in the running forward."""
        return self.is_whole() or self._plain

    def _own_tokens(self, *, training: bool) -> None:
        """From here on dropout applies to this rank's tokens. See [Note: streams]: not from the start of a block."""
        if self._streams is not None and training:
            self._streams.own()

    def _same_tokens(self) -> None:
        if self._streams is not None:
            self._streams.alike()

    def read_by(self, child: nn.Module, products: Sequence[nn.Module]) -> None:
        """Start the sum after `child` in backward early: `products` of `child` read its input, or are `child` itself."""
        self._products[id(child)] = [weakref.ref(product) for product in products]
        for product in products:
            if product is not child:
                product.register_forward_pre_hook(self._reads)

    def _reads(self, product: nn.Module, args: Any) -> object:
        crossed = self._crossed
        if crossed is None or not args or args[0] is not crossed.tensor:
            return None
        return (crossed.entering(product), *args[1:])

    def _entered(self, x: torch.Tensor, child: nn.Module) -> torch.Tensor:
        self._same_tokens()
        products = [product for known in self._products.get(id(child), ()) if (product := known()) is not None]
        if not products:
            return tp_collectives.whole_sequence_replicated(x, self.peers, self.length)
        self._crossed = tp_collectives.whole_sequence_early(x, self.peers, self.length, products)
        return self._crossed.entering(child)

    def _left(self, x: torch.Tensor, training: bool) -> torch.Tensor:
        self._crossed = None
        if self._plain:
            self._same_tokens()
            return tp_collectives.to_invariant(x, self.peers)
        self._own_tokens(training=training)
        return tp_collectives.sum_over_sequence(x, self.peers, self.length)

    # ------------------------------------------------------------------ lengths

    def continues(self, args: object, kwargs: object) -> None:
        """The next block takes a part of the hidden states of this call, which are whole. Local; called by a pipeline."""
        _first(args, kwargs, self._measure)

    def _measure(self, x: torch.Tensor) -> torch.Tensor:
        self._length = x.shape[1]
        return x

    def _enter(self, caller: nn.Module, args: object) -> None:
        self._depth += 1
        if self._depth == 1:
            self._plain = not torch.is_grad_enabled()

    def _leave(self, caller: nn.Module, args: object, output: object) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._depth, self._plain = 0, False

    def _begin(self, block: nn.Module, args: object, kwargs: Mapping[str, object]) -> Any:
        if self.off:
            return None

        def split(x: torch.Tensor) -> torch.Tensor:
            return tp_collectives.to_rows_of_sequence(self._measure(x), self.peers, self._length)

        changed = _first(args, kwargs, split)
        self._refuse_factors(block, kwargs)
        self._remember(*changed)
        return changed

    def _refuse_factors(self, block: nn.Module, kwargs: Mapping[str, object]) -> None:
        """A factor for each token (Mllama's mask of rows that see no image) meets hidden states, of which a rank has a part."""
        for name, value in kwargs.items():
            for x in () if name in _NEEDS_ALL else pytree.leaves(value):
                if (
                    isinstance(x, torch.Tensor)
                    and x.dim() > 2
                    and x.shape[-2:] == (self._length, 1)
                    and self._length > 1
                ):
                    raise ModelError(
                        f"hf_dist.sequence_regions: {type(block).__name__} is given {name}, a number for each token, and each "
                        'rank has a part of the tokens there. Set "hf_dist": {"sequence_regions": false}.'
                    )

    def _next(self, block: nn.Module, args: object, kwargs: object) -> None:
        if self.off:
            return
        if self._depth:
            self._remember(args, kwargs)
            return
        known = ((t, self._known.get(id(t))) for t in _tensors(args, kwargs))
        found = next((row for tensor, row in known if row is not None and row[0]() is tensor), None)
        if found is None:
            raise ModelError(
                "hf_dist.sequence_regions: a block is run again and its tensors are others than in the forward. Set "
                'gradient_checkpointing_kwargs={"use_reentrant": False}, or "hf_dist": {"sequence_regions": false}.'
            )
        self._length = found[1]

    def _remember(self, args: object, kwargs: object) -> None:
        if len(self._known) > _MOST:
            self._known = {key: row for key, row in self._known.items() if row[0]() is not None}
        for tensor in _tensors(args, kwargs):
            self._known[id(tensor)] = (weakref.ref(tensor), self._length)

    def _end(self, block: nn.Module, args: object, output: object) -> object:
        if self.off:
            return None
        return _changed(output, lambda x: tp_collectives.whole_sequence(x, self.peers, self.length))


def _joined_shape(logits: torch.Tensor, rows: torch.Tensor, length: int) -> tuple[int, ...]:
    """Shape of the `logits` of all tokens, with the same dimensions."""
    return (len(rows), length, rows.shape[-1]) if logits.dim() == 3 else (len(rows) * length, rows.shape[-1])


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    found = []
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, torch.Tensor):
                found.append(item)
    return found


def _first(args: Any, kwargs: Any, change: Change) -> tuple[object, Any]:
    """Apply `change` to the hidden states of a call."""
    if args and isinstance(args[0], torch.Tensor):
        return (change(args[0]), *args[1:]), kwargs
    if isinstance(kwargs.get("hidden_states"), torch.Tensor):
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
    raise ModelError("a block is called without hidden states")


def _changed(output: Any, change: Change) -> object:
    if isinstance(output, tuple):
        return (change(output[0]), *output[1:])
    return change(output)
