"""The part of a pipelined model that one rank shards."""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from hf_dist.mesh import MeshAxis


@dataclass(frozen=True)
class PipelineShare:
    """What a rank holds of a model that is cut into pipeline stages."""

    names: Sequence[Container[str]]
    """Of every stage of this rank, first to last: the parameters."""
    holders: Mapping[str, MeshAxis]
    """Parameters that other ranks of the pipeline hold, too."""
    elsewhere: Mapping[str, weakref.ref[nn.Parameter]]
    """The parameters of other ranks' stages: an optimizer may have been made over them."""
    whole: nn.Module
    """The model before the cut, on meta: names, shapes and dtypes of everything."""

    def name_elsewhere(self, param: nn.Parameter) -> str | None:
        """The name of a parameter that another stage holds."""
        return next((name for name, ref in self.elsewhere.items() if ref() is param), None)
