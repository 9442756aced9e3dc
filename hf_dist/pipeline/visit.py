"""A forward outside a schedule (`generate`, a probe): every rank runs every block, with weights that come for the call.

Slow, as weights travel in every call, but any code around the model works: caches, encoders called alone, sampling loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_dist import collectives
from hf_dist.errors import ModelError
from hf_dist.log import say_once
from hf_dist.mesh import MeshAxis
from hf_dist.pipeline.stage_plan import StagePlan

__all__ = ["Visits"]


@dataclass(frozen=True)
class _Attribute:
    """Where a module of the visited subtree has a parameter."""

    owner: nn.Module
    attribute: str
    name: str
    """Of the parameter in the whole model."""


class Visits:
    """Brings the parameters of a module to all pipeline ranks for the time of a call, and takes them away again."""

    def __init__(
        self,
        model: nn.Module,
        plan: StagePlan,
        axis: MeshAxis,
        compute_dtype: Callable[[str, torch.dtype], torch.dtype],
    ) -> None:
        """`model`: before its parameters were dropped. `axis`: pp. `compute_dtype`: as for `StagedModel`."""
        self.axis = axis
        self.model_name = type(model).__name__
        self.make_readable: Callable[[str], None] = lambda name: None
        """Called with a parameter of this rank before it is read."""
        names = {id(p): name for name, p in model.named_parameters()}
        self._shapes = {n: (compute_dtype(n, p.dtype), tuple(p.shape)) for n, p in model.named_parameters()}
        self._attributes = {path: _attributes(model.get_submodule(path), names) for path in plan.blocks | plan.outside}
        self._source = {name: stages[0] % axis.size for name, stages in plan.owners.items()}
        held = {name: {stage % axis.size for stage in stages} for name, stages in plan.owners.items()}
        self._everywhere = {name for name, ranks in held.items() if len(ranks) == axis.size}
        self._refused = min((name for name in plan.loose if name not in self._everywhere), default=None)
        self._inside = False

    @contextmanager
    def __call__(self, path: str) -> Iterator[None]:
        """Inside, the module at `path` has all its parameters on every rank. Collective over pp, in the same order.

        Raises `ModelError` when a gradient is asked for, or when the code around the modules reads a parameter itself.
        """
        if self._inside:  # what is in a visited module came with it
            yield
            return
        self._check()
        say_once(
            "a forward outside the pipeline's schedule (generate, for example): every rank runs all blocks, and weights travel "
            "between the stages in every call; correct, but slow"
        )
        self._inside = True
        before = [(p, getattr(p.owner, p.attribute)) for p in self._attributes[path] if p.name not in self._everywhere]
        arrived: dict[str, torch.Tensor] = {}
        try:
            for at, value in before:
                if at.name not in arrived:
                    arrived[at.name] = self._fetch(at.name, value)
                if not isinstance(value, nn.Parameter):
                    setattr(at.owner, at.attribute, arrived[at.name])
            yield
        finally:
            self._inside = False
            for at, value in before:
                if not isinstance(value, nn.Parameter):
                    setattr(at.owner, at.attribute, value)

    def _fetch(self, name: str, value: torch.Tensor) -> torch.Tensor:
        source = self._source[name]
        if self.axis.rank == source:
            self.make_readable(name)
            tensor = value.detach()
        else:
            dtype, shape = self._shapes[name]
            tensor = torch.empty(shape, dtype=dtype, device=value.device)
        collectives.broadcast(self.axis, tensor.view(-1).view(torch.uint8), source)
        return tensor

    def _check(self) -> None:
        if torch.is_grad_enabled():
            raise ModelError(
                f"{self.model_name} is cut into pipeline stages: a forward with gradients goes through the schedule "
                "(the Trainer's training_step, engine.train_batch). For anything else use torch.no_grad()."
            )
        if self._refused is not None:
            raise ModelError(
                f"{self.model_name} reads {self._refused} in code between its modules, so it cannot run outside the pipeline's "
                "schedule (generate). Save a checkpoint and generate without a pipeline."
            )


def _attributes(module: nn.Module, names: dict[int, str]) -> list[_Attribute]:
    found: list[Any] = []
    for owner in module.modules():
        for attribute, param in owner._parameters.items():
            if param is not None:
                found.append(_Attribute(owner, attribute, names[id(param)]))
    return found
