"""A mean over ranks that travels as products of thin matrices: PowerSGD.

    M = gradient + rest      a matrix [n, m] of each parameter: its first dim by all others
    P = M Q                  averaged over the ranks, then made orthonormal
    R = M^T P                averaged over the ranks
    mean = P R^T             what every rank takes; rest = M - P (M^T P)
    Q = R, orthonormal       of the next message (a warm start), else a new random one

Both messages hold all matrices of a group, the first one also what is sent as it is: parameters of one dim, and those that
would have more numbers as two factors. All ranks compute the same factors, so their weights stay equal.
Source: Vogels et al. 2019 (arXiv 1905.13727), algorithms 1 and 2.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from hf_dist.dist import collectives
from hf_dist.dist.coded import Residual
from hf_dist.dist.collectives import Handle
from hf_dist.dist.mesh import MeshAxis

__all__ = ["LowRank", "LowRankMean", "Matrix", "kept_numel", "matrices_of", "message_numels"]

_SLACK = 1e-5
"""Share of the mean square by which directions count as there: matrices of a lower rank stay finite, and nothing jumps."""


@dataclass(frozen=True)
class LowRank:
    """How much is sent of each matrix, and from when on."""

    rank: int = 4
    """Columns of the two factors, at most."""
    start: int = 1000
    """Messages that are sent as they are, before the first one in factors."""
    feedback: bool = True
    """Whether what a message left out is added to the next one."""
    warm: bool = True
    """Whether a message begins with the directions of the last one."""
    least: float = 2.0
    """How many times fewer numbers the factors must have, or the matrix is sent as it is."""


@dataclass(frozen=True)
class Matrix:
    """A parameter that is sent in factors, and where the flat tensor has it."""

    name: str
    offset: int
    rows: int
    columns: int
    rank: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The matrix in the group's flat tensor."""
        return flat[self.offset : self.offset + self.numel].view(self.rows, self.columns)


def matrices_of(
    slots: Iterable[tuple[str, tuple[int, ...], int]], form: LowRank
) -> tuple[tuple[Matrix, ...], tuple[tuple[int, int], ...]]:
    """(matrices, intervals that are sent as they are) of a group. Pure. `slots`: (name, shape, offset) of its parameters."""
    matrices, whole = [], []
    for name, shape, offset in slots:
        numel = math.prod(shape)
        rows = shape[0] if len(shape) > 1 else 1
        columns = numel // max(rows, 1)
        rank = min(form.rank, rows, columns)
        if len(shape) > 1 and rank * (rows + columns) * form.least < numel:
            matrices.append(Matrix(name, offset, rows, columns, rank))
        elif numel:
            whole.append((offset, offset + numel))
    return tuple(matrices), tuple(whole)


def message_numels(matrices: Sequence[Matrix], whole: Sequence[tuple[int, int]], numel: int) -> tuple[int, ...]:
    """Numbers in each all-reduce of a group of `numel` elements, once matrices are sent in factors. Pure."""
    if not matrices:
        return (numel,)
    first = sum(m.rows * m.rank for m in matrices) + sum(stop - start for start, stop in whole)
    return first, sum(m.columns * m.rank for m in matrices)


def kept_numel(matrices: Sequence[Matrix], form: LowRank) -> int:
    """Numbers in fp32 that a rank keeps between two messages. Pure."""
    rest = sum(m.numel for m in matrices) if form.feedback else 0
    return rest + (sum(m.columns * m.rank for m in matrices) if form.warm else 0)


@dataclass(eq=False)
class LowRankMean:
    """The averages of one group's flat gradient, and what they have left out. Beside `coded.Wire`, with the same calls."""

    form: LowRank
    matrices: Sequence[Matrix]
    whole: Sequence[tuple[int, int]]
    """Intervals of the flat tensor that are sent as they are."""
    residuals: dict[str, Residual] = field(default_factory=dict)
    """What a checkpoint keeps: "rest" (of the matrices, one after another), "directions" (Q), "count" (messages so far)."""

    @property
    def feedback(self) -> bool:
        """Whether there is something to keep."""
        return True

    @property
    def resident_nbytes(self) -> int:
        """Bytes of what messages have left out, and of the directions."""
        kept = (residual.values for name, residual in self.residuals.items() if name != "count")
        return sum(values.numel() * values.element_size() for values in kept if values is not None)

    def multiply(self, factor: float) -> None:
        """Multiply what messages have left out, where the unit of gradients changes. Local."""
        if "rest" in self.residuals:
            self.residuals["rest"].multiply(factor)

    def all_reduce(self, axis: MeshAxis, tensor: torch.Tensor) -> Handle:
        """Average `tensor` (1-D, the group's flat gradient) in place over `axis`; factors travel in its dtype.

        Collective over `axis`. Padding between parameters is not averaged.
        """
        number = self._next_number()
        if number < self.form.start or not self.matrices:
            return collectives.all_reduce(axis, tensor)
        with torch.no_grad():
            given = [self._added(i, m.view(tensor)) for i, m in enumerate(self.matrices)]
            begun = self._begun(number, tensor.device)
            factors = [m @ q for m, q in zip(given, begun, strict=True)]
            first = torch.cat(
                [t.reshape(-1).to(tensor.dtype) for t in (*factors, *(tensor[a:b] for a, b in self.whole))]
            )
        return Handle([collectives.all_reduce(axis, first)], lambda: self._second(axis, tensor, given, first))

    @torch.no_grad()
    def _second(self, axis: MeshAxis, tensor: torch.Tensor, given: list[torch.Tensor], first: torch.Tensor) -> None:
        sizes = [m.rows * m.rank for m in self.matrices] + [b - a for a, b in self.whole]
        parts = first.split(sizes)
        lefts = [
            orthonormal(part.float().view(m.rows, m.rank))
            for part, m in zip(parts[: len(self.matrices)], self.matrices, strict=True)
        ]
        for (start, stop), part in zip(self.whole, parts[len(self.matrices) :], strict=True):
            tensor[start:stop] = part
        rights = [m.T @ p for m, p in zip(given, lefts, strict=True)]
        own = torch.cat([r.reshape(-1) for r in rights])
        second = own.to(tensor.dtype) if tensor.dtype != own.dtype else own.clone()
        handle = collectives.all_reduce(axis, second)
        if self.form.feedback:
            self._keep(
                "rest", torch.cat([(m - p @ r.T).view(-1) for m, p, r in zip(given, lefts, rights, strict=True)])
            )
        handle.wait()
        mean = second.float()
        for m, p, r in zip(self.matrices, lefts, self._split(mean), strict=True):
            m.view(tensor).copy_(p @ r.T)
        if self.form.warm:
            self._keep("directions", mean)

    def _added(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """The matrix to send: the gradient and the rest of the last message, in fp32."""
        rest = self.residuals.get("rest")
        if rest is None or rest.values is None:
            return gradient.float()
        first = sum(m.numel for m in self.matrices[:index])
        return rest.values[first : first + gradient.numel()].view(gradient.shape) + gradient

    def _begun(self, number: int, device: torch.device) -> list[torch.Tensor]:
        """Q of each matrix, equal on all ranks."""
        kept = self.residuals.get("directions")
        if self.form.warm and kept is not None and kept.values is not None:
            return [orthonormal(q) for q in self._split(kept.values)]
        return [orthonormal(_random(m, 0 if self.form.warm else number, device)) for m in self.matrices]

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = flat.split([m.columns * m.rank for m in self.matrices])
        return [part.view(m.columns, m.rank) for part, m in zip(parts, self.matrices, strict=True)]

    def _keep(self, name: str, values: torch.Tensor) -> None:
        """Keep `values`, unless they have inf or NaN: such a step is skipped, and must not spoil the next one."""
        held = self.residuals.setdefault(name, Residual())
        before = torch.zeros_like(values) if held.values is None else held.values
        # Chosen on the device, because the host must not wait. Zeros as directions would stay zeros.
        if held.values is None and name == "directions":
            before = torch.cat([_random(m, 0, values.device).reshape(-1) for m in self.matrices])
        held.values = torch.where(values.isfinite().all(), values, before)

    def _next_number(self) -> int:
        """Messages before this one. On the host, unless a checkpoint has just been read."""
        held = self.residuals.setdefault("count", Residual())
        number = 0 if held.values is None else int(held.values)
        held.values = torch.tensor([number + 1.0])
        return number


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """`columns` ([n, r], fp32) made orthonormal; directions that are not there come out as zeros. Local, without a host wait.

    By a Cholesky factor of the Gram matrix, which has the same bits wherever the input has.
    """
    scaled = columns / columns.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    gram = scaled.T @ scaled
    slack = gram.diagonal().mean() * _SLACK + torch.finfo(torch.float32).tiny
    lower: torch.Tensor = torch.linalg.cholesky_ex(gram + slack * torch.eye(len(gram), device=gram.device)).L
    rows: torch.Tensor = torch.linalg.solve_triangular(lower, scaled.T, upper=False)
    return rows.T


def _random(matrix: Matrix, number: int, device: torch.device) -> torch.Tensor:
    """Equal on all ranks; drawn on the device, because the host waits for a copy to it."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{matrix.name} {number}".encode()))
    return torch.randn(matrix.columns, matrix.rank, generator=generator, device=device)
