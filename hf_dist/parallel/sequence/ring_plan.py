"""Which queries and keys a ring multiplies: rectangles in which every query sees every key, triangles, and small masked ones.

A mask (packed documents, padding, windows) divides the square of queries and keys into areas. Attention kernels take "all" and
"causal" areas of any size in memory that does not grow with their area. What is neither is divided until it is, or until it is
`TILE` positions long: only that is multiplied with a mask, in fp32, (rows, heads, TILE, TILE) at a time. Areas that no query
sees are left out. A document or padding of a tile or more is an area of its own: packed rows have few masked tiles.

A plan is made once per mask of a forward. The host waits twice, for the borders in the rows and for the counts of all areas;
not at all for plain causal masks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hf_dist.parallel.sequence.forward import Rule, SequenceMask, SplitForward
from hf_dist.tensors import host_read

__all__ = ["Kind", "Plan", "Tile", "masked_nbytes", "plan_of", "smaller"]

TILE = 512
"""Positions; a masked tile of one row with 32 heads of 128 takes 159 MB (`masked_nbytes`)."""
_MOST = 1 << 24
"""Elements of the mask that are evaluated at a time."""

Kind = str | torch.Tensor
""" "all", "causal" (equally many queries and keys), or a boolean (rows, 1, q, k): the keys that a query attends to."""


@dataclass(frozen=True, eq=False)
class Tile:
    """Some queries of this rank and some keys of one rank."""

    query: slice
    """Of the positions that this rank has, in its order."""
    key: slice
    """Of the positions that the other has."""
    kind: Kind
    rows: slice = field(default_factory=lambda: slice(None))


Plan = tuple[tuple[Tile, ...], ...]
"""By the rank that has the keys."""


def masked_nbytes(rows: int, heads: int, length: int, width: int) -> int:
    """Most bytes that a masked tile takes, in backward: scores and their gradient, and eleven fp32 tensors like its queries.

    `length`: of a chunk; `heads`: on this rank, `width` wide. Pure.
    """
    size = min(TILE, length)
    return 4 * rows * heads * size * (2 * size + 11 * width)


def plan_of(mask: SequenceMask, rows: int) -> Plan:
    """What this rank multiplies, in `rows` rows. Local."""
    forward = mask.forward
    layout, axis = forward.axes.layout, forward.axes.outer
    chunk = forward.length // (2 * layout.outer)
    if mask.is_causal:  # no rule to evaluate
        mine = layout.chunks_of(axis.rank)
        return tuple(
            tuple(
                Tile(_nth(i, chunk), _nth(j, chunk), "causal" if q == k else "all")
                for i, q in enumerate(mine)
                for j, k in enumerate(layout.chunks_of(rank))
                if k <= q
            )
            for rank in range(layout.outer)
        )
    areas = _Areas(mask.rule, forward, rows)
    return tuple(tuple(_tiles(areas, rank)) for rank in range(layout.outer))


def smaller(tile: Tile) -> Iterator[Tile]:
    """`tile` ("all" or "causal") in parts of at most `TILE` queries and keys, for a device without a kernel for it."""
    most = TILE
    for q in range(tile.query.start, tile.query.stop, most):
        query = slice(q, min(q + most, tile.query.stop))
        for k in range(tile.key.start, tile.key.stop, most):
            key = slice(k, min(k + most, tile.key.stop))
            below = (q - tile.query.start) - (k - tile.key.start)
            if tile.kind == "all" or below > 0:
                yield Tile(query, key, "all", tile.rows)
            elif below == 0:
                yield Tile(query, key, "causal", tile.rows)


def _nth(number: int, size: int) -> slice:
    return slice(number * size, (number + 1) * size)


Area = tuple[int, int, int, int, str]
"""First and last query, first and last key, kind; "mask" if it needs one."""


def _tiles(areas: _Areas, rank: int) -> Iterator[Tile]:
    """What this rank multiplies with the keys of `rank`."""
    layout, axis, chunk = areas.layout, areas.forward.axes.outer, areas.chunk
    for i, mine in enumerate(layout.chunks_of(axis.rank)):
        for j, theirs in enumerate(layout.chunks_of(rank)):
            by_row = [list(areas.between(row, mine, theirs)) for row in range(areas.rows)]
            alike = all(found == by_row[0] for found in by_row)
            for row, found in enumerate(by_row[:1] if alike else by_row):
                rows = slice(0, areas.rows) if alike else slice(row, row + 1)
                for q0, q1, k0, k1, kind in found:
                    what = areas.evaluated(rows, slice(q0, q1), slice(k0, k1)) if kind == "mask" else kind
                    at = (i - mine) * chunk, (j - theirs) * chunk
                    yield Tile(slice(at[0] + q0, at[0] + q1), slice(at[1] + k0, at[1] + k1), what, rows)


class _Areas:
    """How many pairs of each area are seen, by row."""

    def __init__(self, rule: Rule, forward: SplitForward, rows: int) -> None:
        self.forward, self.rows = forward, rows
        self.layout = forward.axes.layout
        self.chunk = forward.length // (2 * self.layout.outer)
        self._rule = rule
        self._device = forward.position_ids.device
        self._own = self.layout.chunks_of(forward.axes.outer.rank)
        self.coarse = [_segments(borders, forward.length, self.chunk) for borders in _borders(forward, rows)]
        """By row: where areas begin that one document or padding fills, and the end."""
        self.fine = [_divided(edges) for edges in self.coarse]
        """The same with nothing longer than a tile."""
        counts = [self._counted(row) for row in range(rows)]
        read = host_read.on_host(torch.cat([each.flatten() for each in counts]))
        ends = np.cumsum([each.numel() for each in counts])[:-1]
        self.grids = [
            _Grid(part.reshape(each.shape), edges)
            for part, each, edges in zip(np.split(read, ends), counts, self.fine, strict=True)
        ]
        """By row."""

    def evaluated(self, rows: slice, query: slice, key: slice) -> torch.Tensor:
        """(rows, 1, q, k) bool: the mask of an area."""
        batch = torch.arange(rows.start, rows.stop, device=self._device)[:, None, None, None]
        head = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=self._device)
        q, k = (torch.arange(x.start, x.stop, device=self._device) for x in (query, key))
        seen = self._rule(batch, head, q[None, None, :, None], k[None, None, None, :])
        return seen.expand(rows.stop - rows.start, 1, len(q), len(k))

    def _counted(self, row: int) -> torch.Tensor:
        length, edges = self.forward.length, self.fine[row]
        tile_of = _numbers(edges, self._device)
        keys = torch.arange(length, device=self._device)
        counts = torch.zeros(2, len(edges) - 1, len(edges) - 1, dtype=torch.long, device=self._device)
        step = max(1, min(TILE, _MOST // length))
        for chunk in self._own:
            for start in range(chunk * self.chunk, (chunk + 1) * self.chunk, step):
                query = slice(start, min(start + step, (chunk + 1) * self.chunk))
                seen = self.evaluated(slice(row, row + 1), query, slice(0, length))[0, 0]
                both = torch.stack([seen, seen & (keys <= keys[query, None])]).int()
                by_key = both.new_zeros(2, both.shape[1], counts.shape[2]).index_add_(2, tile_of, both)
                counts.index_add_(1, tile_of[query], by_key.long())
        return counts

    def between(self, row: int, mine: int, theirs: int) -> Iterator[Area]:
        """The areas of one pair of chunks."""
        grid = self.grids[row]
        query, key = (
            [e for e in self.coarse[row] if n * self.chunk <= e <= (n + 1) * self.chunk] for n in (mine, theirs)
        )
        for i, j in grid.seen(query, key):
            yield from grid.cover(query[i], query[i + 1], key[j], key[j + 1])


class _Grid:
    """The counts of one row: (2, tiles, tiles) pairs that are seen, and those of them at or below the diagonal."""

    def __init__(self, counts: np.ndarray, edges: Sequence[int]) -> None:
        self._edges = edges
        self._place = {edge: number for number, edge in enumerate(edges)}
        self._sums = np.pad(counts, ((0, 0), (1, 0), (1, 0))).cumsum(1).cumsum(2)
        self._seen, self._lower = self._sums.tolist()

    def seen(self, query: Sequence[int], key: Sequence[int]) -> list[list[int]]:
        """Which parts between two edges each see anything."""
        corners = self._sums[0][np.ix_(*([self._place[e] for e in edges] for edges in (query, key)))]
        found: list[list[int]] = np.argwhere(np.diff(np.diff(corners, axis=0), axis=1) > 0).tolist()
        return found

    def cover(self, q0: int, q1: int, k0: int, k1: int) -> Iterator[Area]:
        """Areas of one kind that cover what is seen between these edges."""
        a, b, c, d = (self._place[edge] for edge in (q0, q1, k0, k1))
        seen = _between(self._seen, a, b, c, d)
        if not seen:
            return
        n = q1 - q0
        if seen == n * (k1 - k0):
            yield q0, q1, k0, k1, "all"
        elif (q0, q1) == (k0, k1) and seen == _between(self._lower, a, b, c, d) == n * (n + 1) // 2:
            yield q0, q1, k0, k1, "causal"
        elif b - a == d - c == 1:
            yield q0, q1, k0, k1, "mask"
        else:
            for query in _halves(self._edges[a : b + 1]):
                for key in _halves(self._edges[c : d + 1]):
                    yield from self.cover(*query, *key)


def _between(sums: Sequence[Sequence[int]], a: int, b: int, c: int, d: int) -> int:
    return sums[b][d] - sums[a][d] - sums[b][c] + sums[a][c]


def _halves(edges: Sequence[int]) -> list[tuple[int, int]]:
    if len(edges) == 2:
        return [(edges[0], edges[1])]
    middle = edges[len(edges) // 2]
    return [(edges[0], middle), (middle, edges[-1])]


def _borders(forward: SplitForward, rows: int) -> list[list[int]]:
    """By row: positions at which a document, or padding, begins. The host waits once, if rows have any."""
    facts = [x for x in (forward.documents, forward.attention_mask) if x is not None]
    if not facts:
        return [[]] * rows
    begins = torch.stack([(x[:, 1:] != x[:, :-1]).expand(rows, -1) for x in facts]).any(0)
    return [(np.flatnonzero(row) + 1).tolist() for row in host_read.on_host(begins)]


def _segments(borders: Sequence[int], length: int, chunk: int) -> list[int]:
    """Edges of chunks, and of documents if there is a whole tile on one side: many short ones share a masked tile."""
    edges = [0, *borders, length]
    long = {e for a, e, b in zip(edges, edges[1:], edges[2:], strict=False) if e - a >= TILE or b - e >= TILE}
    return sorted(long | set(range(0, length + 1, chunk)))


def _divided(edges: Sequence[int]) -> list[int]:
    found = [e for a, b in itertools.pairwise(edges) for e in range(a, b, TILE)]
    return [*found, edges[-1]]


def _numbers(edges: Sequence[int], device: torch.device) -> torch.Tensor:
    """(length,) number of the tile of each position."""
    found = torch.from_numpy(np.repeat(np.arange(len(edges) - 1), np.diff(edges)))
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)
