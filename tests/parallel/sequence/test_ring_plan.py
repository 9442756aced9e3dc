"""A ring multiplies every pair of a query and a key that the mask shows once, and no other, in tiles of a bounded size."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dist.dist.mesh import MeshAxis
from hf_dist.parallel.sequence import ring, ring_plan
from hf_dist.parallel.sequence.forward import Rule, SequenceAxes, SequenceMask, SplitForward
from hf_dist.parallel.sequence.layout import SequenceLayout
from hf_dist.tensors import host_read, pytree
from tests.host_reads import Waits

SEEDS = range(12)


def forward_of(rank: int, outer: int, length: int, mask: torch.Tensor | None, documents: torch.Tensor | None) -> Any:
    layout = SequenceLayout(1, outer, "ring")
    axes = SequenceAxes(
        *(MeshAxis(n, s, r, None) for n, s, r in (("cp", outer, rank), ("u", 1, 0), ("o", outer, rank))), layout
    )
    return SplitForward(axes, length, length, mask, torch.arange(length)[None], documents)


def causal(batch: Any, head: Any, q: Any, k: Any) -> Any:
    return k <= q


def drawn(seed: int) -> tuple[int, int, int, Rule, torch.Tensor | None, torch.Tensor | None]:
    """A number of ranks, a length, rows, and a mask: windows, documents, padding on either side, or all of them."""
    draw = random.Random(seed)
    outer, rows = draw.choice([2, 3]), draw.choice([1, 2, 3])
    length = 2 * outer * draw.randint(3, 17)
    rules: list[Rule] = [causal] if draw.random() < 0.8 else [lambda b, h, q, k: (q >= 0) & (k >= 0)]
    mask = documents = None
    if draw.random() < 0.5:
        window = draw.randint(1, length)
        rules.append(lambda b, h, q, k: k > q - window)
    if draw.random() < 0.6:
        documents = torch.stack([(torch.rand(length) < draw.choice([0.02, 0.1, 0.5])).cumsum(0) for _ in range(rows)])
        rules.append(lambda b, h, q, k: documents[b, q] == documents[b, k])
    if draw.random() < 0.5:
        real = torch.tensor([draw.randint(0, length) for _ in range(rows)])
        mask = torch.arange(length) < real[:, None]
        mask = mask.flip(1) if draw.random() < 0.5 else mask
        rules.append(lambda b, h, q, k: mask[b, k])

    def every(*at: Any) -> Any:
        found = rules[0](*at)
        for rule in rules[1:]:
            found = found & rule(*at)
        return found

    return outer, length, rows, every, mask, documents


def whole(rule: Rule, rows: int, length: int) -> torch.Tensor:
    places = torch.arange(length)
    at = torch.arange(rows)[:, None, None, None], torch.zeros(1, 1, 1, 1, dtype=torch.long)
    return rule(*at, places[:, None], places).expand(rows, 1, length, length)[:, 0]


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list to which each wait of the host is added: what runs on the device asks nothing, and `host_read` has the rest."""
    found: list[str] = []

    def watched(name: str) -> None:
        function = getattr(ring_plan._Areas, name)

        def run(self: object, *args: object) -> object:
            with Waits() as waits:
                result = function(self, *args)
            found.extend(waits.seen)
            return result

        monkeypatch.setattr(ring_plan._Areas, name, run)

    watched("_counted")
    watched("evaluated")
    monkeypatch.setattr(host_read, "on_host", lambda tensor: found.append("read") or tensor.numpy())
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_every_pair_that_is_seen_is_in_one_tile(size: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_plan, "TILE", size)
    torch.manual_seed(seed)
    read = count_reads(monkeypatch)
    outer, length, rows, rule, mask, documents = drawn(seed)
    found = torch.zeros(rows, length, length, dtype=torch.long)
    for rank in range(outer):
        forward = forward_of(rank, outer, length, mask, documents)
        layout = forward.axes.layout
        read.clear()
        plan = ring_plan.plan_of(SequenceMask(forward, rule, lambda **given: None), rows)
        assert read == ["read"] * (1 + (mask is not None or documents is not None))
        for source, tiles in enumerate(plan):
            mine, theirs = layout.positions(rank, length), layout.positions(source, length)
            for tile in tiles:
                q, k = mine[tile.query], theirs[tile.key]
                seen = tile.kind
                if isinstance(seen, str):
                    seen = torch.ones(len(q), len(k), dtype=torch.bool)
                    seen = seen.tril() if tile.kind == "causal" else seen
                else:
                    assert len(q) <= size >= len(k)
                found[tile.rows, q[:, None], k] += seen.reshape(-1, len(q), len(k)).long()
    assert torch.equal(found, whole(rule, rows, length).long())


@pytest.mark.parametrize("size", [3, 512])
@pytest.mark.parametrize("seed", SEEDS)
def test_tiles_add_up_to_attention(size: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients, with and without a kernel; queries that see no key give zeros."""
    monkeypatch.setattr(ring_plan, "TILE", size)
    if seed % 2:
        monkeypatch.setattr(ring, "kernel_for", lambda *given: None)
    torch.manual_seed(seed)
    outer, length, rows, rule, mask, documents = drawn(seed)
    seen = whole(rule, rows, length)[:, None]
    query, key, value, grad = (torch.randn(rows, heads, length, 8).double() for heads in (4, 2, 2, 4))
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    repeated = [leaves[0], *(x.repeat_interleave(2, 1) for x in leaves[1:])]
    expected = functional.scaled_dot_product_attention(*repeated, attn_mask=seen).nan_to_num()
    expected = torch.where(seen.any(-1, keepdim=True), expected, 0.0)
    wanted = [expected.detach(), *torch.autograd.grad(expected, leaves, grad)]

    found = [torch.zeros_like(x) for x in wanted]
    for rank in range(outer):
        forward = forward_of(rank, outer, length, mask, documents)
        plan = ring_plan.plan_of(SequenceMask(forward, rule, lambda **given: None), rows)
        at = [forward.axes.layout.positions(source, length) for source in range(outer)]
        there = [(key[:, :, keys], value[:, :, keys]) for keys in at]
        own, own_grad = query[:, :, at[rank]], grad[:, :, at[rank]]
        out, total = torch.zeros_like(own), own.new_full(own.shape[:-1], -torch.inf)
        for source in range(outer):
            ring._add(plan[source], own, there[source], (out, total), 8**-0.5)
        found[0][:, :, at[rank]] = out
        d_query = torch.zeros_like(own)
        for source, keys in enumerate(at):
            parts = (d_query, *(torch.zeros_like(x) for x in there[source]))
            ring._add_gradients(plan[source], (own_grad, own, out, total), there[source], parts, 8**-0.5)
            for target, part in zip(found[2:], parts[1:], strict=True):
                target[:, :, keys] += part
        found[1][:, :, at[rank]] = d_query
    for got, want in zip(found, wanted, strict=True):
        assert torch.allclose(got, want, rtol=1e-9, atol=1e-9)


class Live(TorchDispatchMode):
    """Bytes that operators allocate and that still live, at most."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.live = self.most = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                self._add(storage._cdata, storage.nbytes())
                weakref.finalize(storage, self._add, storage._cdata, -storage.nbytes())
        return result

    def _add(self, number: int, nbytes: int) -> None:
        (self._seen.discard if nbytes < 0 else self._seen.add)(number)
        self.live += nbytes
        self.most = max(self.most, self.live)


@pytest.mark.parametrize("length", [2048, 8192])
def test_a_masked_tile_costs_the_same_at_any_length(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows of 32 heads in bf16: what `plan` counts."""
    documents = (torch.arange(length)[None] % (length // 4 + 100) == 0).cumsum(1)  # not at the borders of chunks

    def packed(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (documents[b, q] == documents[b, k])

    def rule(b: Any, h: Any, q: Any, k: Any) -> Any:
        return packed(b, h, q, k) & (k > q - length // 8)

    forward = forward_of(1, 2, length, None, documents)

    def masked_of(rule: Any) -> list[ring_plan.Tile]:
        plan = ring_plan.plan_of(SequenceMask(forward, rule, lambda **given: None), 1)
        all_of_them = [tile for tiles in plan for tile in tiles]
        return [
            ring_plan.Tile(t.query, t.key, t.kind.to("meta")) for t in all_of_them if isinstance(t.kind, torch.Tensor)
        ]

    assert masked_of(packed) == []  # triangles and rectangles
    masked = masked_of(rule)
    query, key, value, out = (
        torch.empty(1, 32, length // 2, 128, dtype=torch.bfloat16, device="meta") for _ in range(4)
    )
    total = torch.empty(1, 32, length // 2, device="meta")
    sums = torch.empty(query.shape, device="meta"), total
    parts = [torch.empty(query.shape, device="meta") for _ in range(3)]
    monkeypatch.setattr(ring, "kernel_for", lambda *given: None)
    known = (query, key, value, out, total, *sums, *parts)
    with Live(*known) as live:
        ring._add(masked, query, (key, value), sums, 0.1)
    forward_most = live.most
    with Live(*known) as live:
        ring._add_gradients(masked, (out, query, out, total), (key, value), parts, 0.1)
    counted = ring_plan.masked_nbytes(1, 32, length // 4, 128)
    assert masked and forward_most < live.most <= counted
    assert length <= 4 * ring_plan.TILE or live.most > 0.9 * counted
