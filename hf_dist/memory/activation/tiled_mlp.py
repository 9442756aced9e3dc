"""Runs the MLP of each block on a tile of positions at a time, so that its activations take the memory of one tile.

An MLP treats each position separately and makes up most of a block's activations. Forward keeps only its input. Backward runs
each tile again and sums the weight gradients in fp32; each weight gets one gradient per backward, so hooks and reductions work
as without tiles. Source: arXiv 2506.13996 (ALST), section 4.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_dist.errors import ModelError
from hf_dist.tensors.deferred_tensor import refuse_second_derivatives
from hf_dist.tensors.random_streams import random_state, set_random_state

_NAMES = ("mlp", "feed_forward", "ffn")
_TILES = "_hf_dist_mlp_tiles"


def tile_mlps(model: nn.Module, tiles: int) -> int:
    """Make the MLPs of the model's blocks run in `tiles` parts of the sequence; returns the number of MLPs. Local.

    Raises `ModelError` for a model without a module named mlp, feed_forward or ffn; modules with experts do not count.
    """
    found = mlps_of(model)
    if not found:
        raise ModelError(
            f"activation_checkpointing.mlp_tiles: {type(model).__name__} has no module named {', '.join(_NAMES)} that could "
            "run in parts. Remove the key."
        )
    for module in found:
        if _TILES not in module.__dict__:
            own: object = type(module)
            module.__class__ = _tiled_class(own)
        module.__dict__[_TILES] = tiles
    return len(found)


def mlps_of(model: nn.Module) -> list[nn.Module]:
    """The modules that `tile_mlps` makes run in tiles."""
    return [m for name, m in model.named_modules() if name.rpartition(".")[2] in _NAMES and not _routes(m)]


def _routes(module: nn.Module) -> bool:
    return hasattr(module, "experts") or hasattr(module, "router") or not any(True for _ in module.parameters())


@functools.cache
def _tiled_class(cls: Any) -> type[nn.Module]:
    # Keep the name: models look up classes by it.
    def forward(self: nn.Module, hidden: torch.Tensor, *args: object, **kwargs: object) -> object:
        run = functools.partial(cls.forward, self)
        tiles = min(self.__dict__[_TILES], hidden.shape[1]) if hidden.dim() == 3 else 1
        if tiles == 1 or args or kwargs or not torch.is_grad_enabled():
            return run(hidden, *args, **kwargs)
        params = [p for p in self.parameters() if p.requires_grad]
        drops = self.training and any(isinstance(m, nn.Dropout) and m.p > 0 for m in self.modules())
        return _Tiles.apply(run, tiles, drops, hidden, *params)

    members = {
        "forward": forward,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return type(cls.__name__, (cls,), members)


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., torch.Tensor], tiles: int, drops: bool, hidden: torch.Tensor, *params: torch.Tensor
    ) -> torch.Tensor:
        ctx.run, ctx.tiles, ctx.params = run, tiles, params
        ctx.random = random_state() if drops else None
        ctx.save_for_backward(hidden)
        # GPT-2's layers view their input as rows, which a part of a longer tensor is not.
        return torch.cat([run(tile.contiguous()) for tile in hidden.tensor_split(tiles, dim=1)], dim=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[object, ...]:
        refuse_second_derivatives("an MLP in tiles. Set activation_checkpointing.mlp_tiles to 1")
        (hidden,) = ctx.saved_tensors
        # The parameter objects, not saved tensors: their memory may have been freed and allocated again since forward.
        params = [p for p, needed in zip(ctx.params, ctx.needs_input_grad[4:], strict=True) if needed]
        sums: list[torch.Tensor | None] = [None] * len(params)
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[3] else None
        before = random_state() if ctx.random is not None else None
        if ctx.random is not None:
            set_random_state(ctx.random)
        at = 0
        for tile, g in zip(hidden.tensor_split(ctx.tiles, dim=1), grad.tensor_split(ctx.tiles, dim=1), strict=True):
            with torch.enable_grad():
                own = tile.detach().contiguous().requires_grad_(d_hidden is not None)
                out = ctx.run(own)
            wanted = ([own] if d_hidden is not None else []) + params
            found = list(torch.autograd.grad(out, wanted, g, allow_unused=True))
            if d_hidden is not None:
                d_hidden[:, at : at + tile.shape[1]] = found.pop(0)
            at += tile.shape[1]
            for i, part in enumerate(found):
                if part is not None:
                    sums[i] = _added(sums[i], part)
        if before is not None:
            set_random_state(before)
        totals = iter([None if s is None else s.to(p.dtype) for s, p in zip(sums, params, strict=True)])
        return (None, None, None, d_hidden, *(next(totals) if needed else None for needed in ctx.needs_input_grad[4:]))


def _added(total: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
    """The running sum of a gradient, in fp32 or wider."""
    return part.to(torch.promote_types(part.dtype, torch.float32)) if total is None else total.add_(part)
