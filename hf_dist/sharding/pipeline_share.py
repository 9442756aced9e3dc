"""The part of a pipelined model that one rank holds and shards."""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from hf_dist.dist.mesh import MeshAxis


@dataclass(frozen=True)
class PipelineShare:
    """One rank's share of a model that is cut into pipeline stages."""

    names: Sequence[Container[str]]
    """Parameter names of each stage of this rank, first stage first."""
    holders: Mapping[str, MeshAxis]
    """Parameters that other ranks of the pipeline also hold, with the axis of their holders."""
    elsewhere: Mapping[str, weakref.ref[nn.Parameter]]
    """Parameters of other ranks' stages, because the user may have made an optimizer over them."""
    whole: nn.Module
    """The model before the cut, on meta: names, shapes and dtypes of everything."""

    def name_elsewhere(self, param: nn.Parameter) -> str | None:
        """The name of a parameter that another stage holds; None if `param` is not such a parameter."""
        return next((name for name, ref in self.elsewhere.items() if ref() is param), None)
