"""Why a search finds no layout: the rows, the model, or the memory."""

from __future__ import annotations

from hf_dist.errors import ConfigError, HfDistError, ModelError, Problem
from hf_dist.format_bytes import size_text
from hf_dist.planning.layouts import layouts
from hf_dist.planning.search import Search

__all__ = ["why_none"]

_TRIED = 8
"""Of the layouts with the least rough bytes, so many are planned."""


def why_none(search: Search) -> str:
    """The least that a layout needs, beside the memory. Local.

    Raises `ConfigError` if the rows of a step cannot be shared by any number of ranks, and `ModelError` if the model cannot be
    run on meta in any layout.
    """
    wanted = search.wanted
    possible = list(layouts(search.shape, wanted))
    if not possible:
        raise ConfigError(
            Problem(
                "--global-batch",
                f"{wanted.rows} rows",
                f"cannot be shared evenly by {wanted.ranks} GPUs in any layout",
                f"Take a multiple of {wanted.ranks} rows.",
            )
        )
    least, problem = None, None
    for layout in sorted(possible, key=search.least_nbytes)[:_TRIED]:
        try:
            found = search.planned(layout)
        except HfDistError as error:
            problem = problem or error
            continue
        if least is None or found.plan.device_need < least.plan.device_need:
            least = found
    if least is None:
        raise ModelError(
            f"no layout of this model can be planned, because it does not run on rows of tokens without memory: {problem}. "
            "`hf-dist plan --config FILE` gives its bytes at rest for one layout."
        ) from problem
    need, limit = least.plan.device_need, search.limits.device
    return f"nothing fits: {least.layout.text} needs least, {size_text(need)} of {size_text(limit or 0)}"
