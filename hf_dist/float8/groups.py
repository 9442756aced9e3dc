"""Groups of rows padded to what float8 kernels take: 16 rows or a multiple, and none empty. The host waits for nothing.

    rows      a a a b b b b b . c        ends   3 8 8 10     (the third group is empty, and a row follows the last one)
    padded    a a a 0 ... | b b b b b 0 ... | 0 ... | c ...  ends   16 32 48 64

How many rows there will be is not known to the host, so it allocates what always suffices: all rows, and 16 for each group.
An empty group gets 16 rows of zeros, because kernels may leave the gradient of its weight unwritten.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["GROUP_MULTIPLE", "PaddedGroups", "padded_groups"]

GROUP_MULTIPLE = 16
"""Of rows in a group."""


@dataclass(frozen=True)
class PaddedGroups:
    """Where rows stand among padded groups."""

    place: torch.Tensor
    """(rows), int64: the place of each row. Rows behind the last group follow its padding."""
    ends: torch.Tensor
    """(groups), int32: the ends of the padded groups."""
    length: int
    """Rows that are allocated: a multiple of 16, at least the last end and the rows behind it."""

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` (rows, k) at their places among rows of zeros, (length, k). Local; differentiable."""
        return rows.new_zeros((self.length, rows.shape[1])).index_copy_(0, self.place, rows)

    def gathered(self, padded: torch.Tensor) -> torch.Tensor:
        """The rows (rows, n) of `padded` (length, n), in their order. Local; differentiable."""
        return padded.index_select(0, self.place)


def padded_groups(ends: torch.Tensor, rows: int) -> PaddedGroups:
    """Places for `rows` rows in groups that end at `ends` (groups), which ascend. Local; the host waits for nothing."""
    ends = ends.long()
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    room = (ends - starts + (GROUP_MULTIPLE - 1)).div(GROUP_MULTIPLE, rounding_mode="floor").clamp(min=1)
    padded = (room * GROUP_MULTIPLE).cumsum(0)
    moved = torch.cat([padded - room * GROUP_MULTIPLE - starts, padded[-1:] - ends[-1:]])  # of each group, and behind
    row = torch.arange(rows, device=ends.device)
    place = row + moved.index_select(0, torch.searchsorted(ends, row, right=True))
    length = GROUP_MULTIPLE * (-(-rows // GROUP_MULTIPLE) + len(ends))
    return PaddedGroups(place, padded.int(), length)
