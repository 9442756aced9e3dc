"""Ring attention: keys and values are passed from rank to rank, and their gradients with them.

Forward: each tile (`ring_plan.py`) of my queries and some rank's keys is computed separately, with the log of its sum of
exponentials, and merged in fp32. Backward: the kernel's own backward of each tile with the final output and sum, so nothing is
merged. The fp32 gradients of keys and values travel one rank behind them, and one more step returns them. Zigzag (`layout.py`):
every rank has one chunk from either end. Sources: arXiv 2310.01889 (ring), 2205.14135 (flash attention, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch

from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis
from hf_dist.parallel.sequence.forward import SequenceMask
from hf_dist.parallel.sequence.kernels import kernel_for
from hf_dist.parallel.sequence.ring_plan import Kind, Plan, Tile, plan_of, smaller


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: SequenceMask, scale: float
) -> torch.Tensor:
    """(B, H, s, D) queries, (B, H', s, D) keys and values of my positions -> (B, H, s, D). Collective over the ring."""
    forward = mask.forward
    axis = forward.axes.outer
    plan = cast(Plan, mask.kept("ring", lambda: plan_of(mask, query.shape[0])))
    result: torch.Tensor = _Ring.apply(axis, query, key, value, plan, scale)
    return result


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        axis: MeshAxis,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: Plan,
        scale: float,
    ) -> torch.Tensor:
        ctx.axis, ctx.plan, ctx.scale = axis, plan, scale
        shape = (*query.shape[:-1], value.shape[-1])
        out = query.new_zeros(shape, dtype=_wide(query.dtype))
        total = out.new_full(shape[:-1], -torch.inf)  # log of the sum of exponentials so far
        for rank, there in _rounds(axis, key, value):
            _add(plan[rank], query, there, (out, total), scale)
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, total)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[object, ...]:
        axis: MeshAxis = ctx.axis
        query, key, value, out, total = ctx.saved_tensors
        wide, grad = _wide(query.dtype), grad.contiguous()
        d_query = torch.zeros_like(query, dtype=wide)
        travelling = torch.zeros(key.numel() + value.numel(), dtype=wide, device=key.device)
        for rank, there in _rounds(axis, key, value):
            gradients = (d_query, *_split(travelling, key, value))
            _add_gradients(ctx.plan[rank], (grad, query, out, total), there, gradients, ctx.scale)
            moved = torch.empty_like(travelling)
            collectives.shift(axis, travelling, moved).wait()  # the last shift returns them
            travelling = moved
        d_key, d_value = _split(travelling, key, value)
        return None, d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None


Tensors = tuple[torch.Tensor, ...]


def _add(tiles: Iterable[Tile], query: torch.Tensor, there: Tensors, sums: Tensors, scale: float) -> None:
    """Attend to the keys and values of one rank. `sums`: output and log of the sum of exponentials, so far."""
    out, total = sums
    for tile in _parts(tiles, query, *there):
        q, k = (tile.rows, slice(None), tile.query), (tile.rows, slice(None), tile.key)
        found = _attend(query[q], there[0][k], there[1][k], tile.kind, scale)
        out[q], total[q] = _merged(out[q], total[q], *found)


def _add_gradients(tiles: Iterable[Tile], mine: Tensors, there: Tensors, gradients: Tensors, scale: float) -> None:
    """`mine`: gradient of the output, queries, final output and log of the sum; `gradients`: of queries, keys and values."""
    grad, query, out, total = mine
    for tile in _parts(tiles, query, *there):
        q, k = (tile.rows, slice(None), tile.query), (tile.rows, slice(None), tile.key)
        found = _attend_backward(grad[q], query[q], there[0][k], there[1][k], out[q], total[q], tile.kind, scale)
        for target, at, part in zip(gradients, (q, k, k), found, strict=True):
            target[at].add_(part)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _split(flat: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = flat.split([key.numel(), value.numel()])
    return keys.view(key.shape), values.view(value.shape)


def _rounds(axis: MeshAxis, key: torch.Tensor, value: torch.Tensor) -> Any:
    """(source rank, (its keys, its values)), my own first; the next ones are in transfer while these are used."""
    both = torch.cat([key.reshape(-1), value.reshape(-1)])
    for step in range(axis.size):
        under_way, coming = None, both
        if step + 1 < axis.size:
            coming = torch.empty_like(both)
            under_way = collectives.shift(axis, both, coming)
        yield (axis.rank - step) % axis.size, _split(both, key, value)
        if under_way is not None:
            under_way.wait()
        both = coming


def _parts(tiles: Iterable[Tile], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Iterator[Tile]:
    """What is computed at a time: everything in tiles if there is no kernel for these tensors."""
    if kernel_for(query, key, value) is not None:
        yield from tiles
        return
    for tile in tiles:
        yield from smaller(tile) if isinstance(tile.kind, str) else (tile,)


def _merged(
    out: torch.Tensor, total: torch.Tensor, new: torch.Tensor, new_total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two outputs over different keys; rows that have seen no key yet have a total of -inf."""
    top = torch.maximum(total, new_total)
    top = top.masked_fill(top.isinf(), 0.0)
    a, b = torch.exp(total - top), torch.exp(new_total - top)
    both = a + b
    share = (b / both.clamp(min=torch.finfo(both.dtype).tiny))[..., None]
    return out + share * (new - out), top + torch.log(both)


def _groups(query: torch.Tensor, key: torch.Tensor) -> int:
    return query.shape[1] // key.shape[1]


def _repeated(x: torch.Tensor, groups: int) -> torch.Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, what: Kind, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, H, q, D) and log of the sum of exponentials (B, H, q), in fp32 or wider."""
    groups = _groups(query, key)
    key, value = _repeated(key, groups), _repeated(value, groups)
    kernel = kernel_for(query, key, value) if isinstance(what, str) else None
    if kernel is not None:
        out, total = kernel.forward(query, key, value, what == "causal", scale)
        total = total.to(_wide(query.dtype))
        return out.to(total.dtype), total
    scores = _scores(query, key, what, scale)
    total = scores.logsumexp(-1)
    shares = _shares(scores, total)
    return shares @ value.to(shares.dtype), total


def _scores(query: torch.Tensor, key: torch.Tensor, what: Kind, scale: float) -> torch.Tensor:
    wide = _wide(query.dtype)
    scores = (query.to(wide) @ key.to(wide).transpose(-1, -2)).mul_(scale)
    if isinstance(what, str):
        if what == "all":
            return scores
        what = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill_(~what, -torch.inf)


def _shares(scores: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """In the place of `scores`."""
    return scores.sub_(total.masked_fill(total.isinf(), 0.0)[..., None]).exp_()


def _attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    what: Kind,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = _groups(query, key)
    key, value = _repeated(key, groups), _repeated(value, groups)
    kernel = kernel_for(query, key, value) if isinstance(what, str) else None
    if kernel is not None:
        found = kernel.backward(grad, (query, key, value), (out, total), what == "causal", scale)
        d_query, d_key, d_value = found
    else:
        wide = _wide(query.dtype)
        grad, query, key, value, out = (x.to(wide) for x in (grad, query, key, value, out))
        shares = _shares(_scores(query, key, what, scale), total)
        d_value = shares.transpose(-1, -2) @ grad
        d_scores = (grad @ value.transpose(-1, -2)).sub_((grad * out).sum(-1, keepdim=True)).mul_(shares).mul_(scale)
        d_query, d_key = d_scores @ key, d_scores.transpose(-1, -2) @ query
    if groups > 1:
        d_key = d_key.unflatten(1, (-1, groups)).sum(2, dtype=_wide(d_key.dtype))
        d_value = d_value.unflatten(1, (-1, groups)).sum(2, dtype=_wide(d_value.dtype))
    return d_query, d_key, d_value
