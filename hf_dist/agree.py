"""Raises one rank's failure on every rank, so that no rank waits for one that has left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from hf_dist import collectives
from hf_dist.mesh import MeshAxis

__all__ = ["agree", "first_problem", "together"]


def first_problem(axis: MeshAxis, problem: Any) -> tuple[int, Any, int] | None:
    """(rank on the axis, its problem, number of other ranks with a problem) of the first rank with one, or None. Collective."""
    found = [(rank, p) for rank, p in enumerate(collectives.all_gather_object(axis, problem)) if p]
    return (*found[0], len(found) - 1) if found else None


def agree(axis: MeshAxis, problem: Any, error: Callable[[Any], Exception], *, names_rank: bool = False) -> None:
    """Raise `error(problem)` on all ranks, with the problem of the first rank that has one. Collective over `axis`.

    `names_rank`: the problem is a text; prefix it as in `rank 3: ...`.
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
    """A block after which all ranks of `axis` raise if one of them failed inside. Collective at its end.

    `explain`: turns this rank's exception into text. `error`: makes the exception from the first failed rank's text. An
    interrupt is also reported to the other ranks, then propagates here.
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
