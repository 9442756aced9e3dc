"""Ring attention: keys and values are passed from rank to rank, and their gradients with them.

Forward: each pair of my queries and some rank's keys is computed separately, with the log of its sum of exponentials, and
merged in fp32. Backward: the kernel's own backward of each pair with the final output and sum, so nothing is merged. The
fp32 gradients of keys and values travel one rank behind them, and one more step returns them. Zigzag (`layout.py`):
every rank has one chunk from either end. Sources: arXiv 2310.01889 (ring), 2205.14135 (flash attention, section 3.1).
"""

from __future__ import annotations

from typing import Any

import torch

from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis
from hf_dist.parallel.sequence.forward import Rule, SequenceMask
from hf_dist.parallel.sequence.kernels import kernel_for

Pair = str | torch.Tensor
""" "none", "all" or "causal", or a boolean (B, 1, q, k): which keys of a chunk a chunk of queries attends to."""
Plan = tuple[tuple[tuple[Pair, ...], ...], ...]
"""[rank that has the keys][my chunk][their chunk]."""


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: SequenceMask, scale: float
) -> torch.Tensor:
    """(B, H, s, D) queries, (B, H', s, D) keys and values of my positions -> (B, H, s, D). Collective over the ring."""
    forward = mask.forward
    axis = forward.axes.outer
    plan = mask.kept("ring", lambda: _plan(mask, query.shape[0], query.device))
    result: torch.Tensor = _Ring.apply(axis, query, key, value, plan, scale)
    return result


def _plan(mask: SequenceMask, rows: int, device: torch.device) -> Plan:
    layout, length = mask.forward.axes.layout, mask.forward.length
    if mask.is_causal:  # no rule to evaluate
        mine = layout.chunks_of(mask.forward.axes.outer.rank)
        return tuple(
            tuple(tuple(_causal_pair(q, k) for k in layout.chunks_of(rank)) for q in mine)
            for rank in range(layout.outer)
        )
    chunks = torch.arange(length, device=device).chunk(2 * layout.outer)
    mine = layout.chunks_of(mask.forward.axes.outer.rank)
    return tuple(
        tuple(tuple(_pair(mask.rule, chunks[q], chunks[k], rows) for k in layout.chunks_of(rank)) for q in mine)
        for rank in range(layout.outer)
    )


def _causal_pair(query: int, key: int) -> Pair:
    return "causal" if query == key else "all" if key < query else "none"


def _pair(rule: Rule, query: torch.Tensor, key: torch.Tensor, rows: int) -> Pair:
    batch = torch.arange(rows, device=query.device)[:, None, None, None]
    head = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=query.device)
    seen = rule(batch, head, query[None, None, :, None], key[None, None, None, :])
    seen = seen.expand(rows, 1, len(query), len(key))
    if not bool(seen.any()):
        return "none"
    if bool(seen.all()):
        return "all"
    if len(query) == len(key) and bool((seen == torch.ones_like(seen[0, 0]).tril()).all()):
        return "causal"
    return seen


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
        half = query.shape[2] // 2
        for rank, (keys, values) in _rounds(axis, key, value):
            for i, j, what in _pairs(plan[rank]):
                q, k = slice(i * half, (i + 1) * half), slice(j * half, (j + 1) * half)
                new, new_total = _attend(query[:, :, q], keys[:, :, k], values[:, :, k], what, scale)
                out[:, :, q], total[:, :, q] = _merged(out[:, :, q], total[:, :, q], new, new_total)
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, total)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[object, ...]:
        axis: MeshAxis = ctx.axis
        query, key, value, out, total = ctx.saved_tensors
        half, wide, grad = query.shape[2] // 2, _wide(query.dtype), grad.contiguous()
        d_query = torch.zeros_like(query, dtype=wide)
        travelling = torch.zeros(key.numel() + value.numel(), dtype=wide, device=key.device)
        for rank, (keys, values) in _rounds(axis, key, value):
            d_key, d_value = _split(travelling, key, value)
            for i, j, what in _pairs(ctx.plan[rank]):
                q, k = slice(i * half, (i + 1) * half), slice(j * half, (j + 1) * half)
                found = (grad[:, :, q], query[:, :, q], keys[:, :, k], values[:, :, k], out[:, :, q], total[:, :, q])
                for target, part in zip(
                    (d_query[:, :, q], d_key[:, :, k], d_value[:, :, k]),
                    _attend_backward(*found, what, ctx.scale),
                    strict=True,
                ):
                    target.add_(part)
            moved = torch.empty_like(travelling)
            collectives.shift(axis, travelling, moved).wait()  # the last shift returns them
            travelling = moved
        d_key, d_value = _split(travelling, key, value)
        return None, d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None


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


def _pairs(plan: tuple[tuple[Pair, ...], ...]) -> Any:
    for i, row in enumerate(plan):
        for j, what in enumerate(row):
            if not (isinstance(what, str) and what == "none"):
                yield i, j, what


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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, what: Pair, scale: float
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
    shares = torch.exp(scores - total.masked_fill(total.isinf(), 0.0)[..., None])
    return shares @ value.to(shares.dtype), total


def _scores(query: torch.Tensor, key: torch.Tensor, what: Pair, scale: float) -> torch.Tensor:
    wide = _wide(query.dtype)
    scores = (query.to(wide) @ key.to(wide).transpose(-1, -2)) * scale
    if isinstance(what, str):
        if what == "all":
            return scores
        what = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~what, -torch.inf)


def _attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    what: Pair,
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
        scores = _scores(query, key, what, scale)
        shares = torch.exp(scores - total.masked_fill(total.isinf(), 0.0)[..., None])
        d_value = shares.transpose(-1, -2) @ grad
        d_scores = shares * (grad @ value.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
        d_query, d_key = d_scores @ key, d_scores.transpose(-1, -2) @ query
    if groups > 1:
        d_key = d_key.unflatten(1, (-1, groups)).sum(2, dtype=_wide(d_key.dtype))
        d_value = d_value.unflatten(1, (-1, groups)).sum(2, dtype=_wide(d_value.dtype))
    return d_query, d_key, d_value
