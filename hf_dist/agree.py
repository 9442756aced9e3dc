"""One problem for all ranks: what fails on one is raised on every rank, so that nobody waits for a rank that has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from hf_dist import collectives
from hf_dist.mesh import MeshAxis

__all__ = ["agree", "first_problem", "together"]


def first_problem(axis: MeshAxis, problem: Any) -> tuple[int, Any, int] | None:
    """(rank on the axis, its problem, how many more have one) of the first rank with one; None if there is none. Collective."""
    found = [(rank, p) for rank, p in enumerate(collectives.all_gather_object(axis, problem)) if p]
    return (*found[0], len(found) - 1) if found else None


def agree(axis: MeshAxis, problem: Any, error: Callable[[Any], Exception], *, names_rank: bool = False) -> None:
    """Raise `error(problem)` of the first rank that has one, on all of them. Collective.

    `names_rank`: the problem is a text, and is told as `rank 3: ...`.
    """
    first = first_problem(axis, problem)
    if first is None:
        return
    rank, text, others = first
    if names_rank:
        more = f" (and {others} more rank{'s' if others > 1 else ''} failed)" if others else ""
        text = f"rank {rank}: {text}{more}"
    raise error(text)


class together:
    """A block after which all ranks of `axis` know whether one of them failed; then all raise. Collective at its end.

    `explain`: an exception of this rank in words. `error`: made of the first rank's. An interrupt is told to the others, too,
    before it goes on here.
    """

    def __init__(self, axis: MeshAxis, explain: Callable[[Exception], str], error: Callable[[str], Exception]) -> None:
        self.axis, self.explain, self.error = axis, explain, error

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, raised: BaseException | None, trace: Any) -> Literal[False]:
        if raised is not None and not isinstance(raised, Exception):
            first_problem(self.axis, f"it was interrupted ({type(raised).__name__})")
            return False
        try:
            agree(self.axis, None if raised is None else self.explain(raised), self.error, names_rank=True)
        except Exception as error:
            raise error from raised
        return False
