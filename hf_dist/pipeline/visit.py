"""A forward outside a schedule (`generate`, a probe): every rank runs every block, with weights that come for the call.

Slow, as weights travel in every call, but any code around the model works: caches, encoders called alone, sampling loops.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_dist import collectives
from hf_dist.boxes import TensorSlice
from hf_dist.errors import ModelError
from hf_dist.log import say_once
from hf_dist.mesh import MeshAxis
from hf_dist.pipeline.stage_plan import StagePlan

__all__ = ["Visits"]


@dataclass(frozen=True)
class _Attribute:
    """Where a module of the visited subtree has a parameter."""

    _owner: weakref.ref[nn.Module]  # weak: the modules hold the visits
    attribute: str
    name: str
    """Of the parameter in the whole model."""

    def read(self) -> torch.Tensor:
        owner: Any = self._owner()
        own: torch.Tensor | None = owner._parameters.get(self.attribute)  # what a property of the class hides, too
        value: torch.Tensor = getattr(owner, self.attribute) if own is None else own
        return value

    def write(self, value: torch.Tensor) -> None:
        setattr(self._owner(), self.attribute, value)


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
        self._read: Callable[[str], torch.Tensor] = lambda name: torch.empty(0)
        self._use_whole: Callable[[bool], None] | None = None
        self._swap: Callable[[nn.Parameter, torch.Tensor], torch.Tensor] = lambda param, data: data
        names = {id(p): name for name, p in model.named_parameters()}
        self._shapes = {n: (compute_dtype(n, p.dtype), tuple(p.shape)) for n, p in model.named_parameters()}
        self._attributes = {path: _attributes(model.get_submodule(path), names) for path in plan.blocks | plan.outside}
        self._source = {name: stages[0] % axis.size for name, stages in plan.owners.items()}
        held = {name: {stage % axis.size for stage in stages} for name, stages in plan.owners.items()}
        self._everywhere = {name for name, ranks in held.items() if len(ranks) == axis.size}
        self._refused = min((name for name in plan.loose if name not in self._everywhere), default=None)
        self._inside = False

    def keep_slices(self, slices: Mapping[str, TensorSlice]) -> None:
        """A rank has `slices` of these parameters also inside: of experts, to which tokens travel. Local."""
        for name, held in slices.items():
            self._shapes[name] = self._shapes[name][0], held.shape

    def read_with(
        self,
        read: Callable[[str], torch.Tensor],
        swap: Callable[[nn.Parameter, torch.Tensor], torch.Tensor],
        use_whole: Callable[[bool], None] | None,
    ) -> None:
        """How parameters of this rank are whole inside. Local.

        `read(name)`: as it is inside, collective over the ranks of its stage that share it. `swap(param, data)`: sets `.data`,
        returns what it was. `use_whole`: told whether the model computes with whole parameters, where they are cut along `tp`.
        """
        self._read, self._swap, self._use_whole = read, swap, use_whole

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
        # What every stage has is there, unless it is cut along tp: a stage that lacks the rest computes with whole parameters.
        missing = [p for p in self._attributes[path] if self._use_whole or p.name not in self._everywhere]
        before = [(p, p.read()) for p in missing]
        own: list[tuple[nn.Parameter, torch.Tensor]] = []
        arrived: dict[str, torch.Tensor] = {}
        if self._use_whole is not None:
            self._use_whole(True)
        try:
            for at, value in before:
                if at.name not in arrived:
                    arrived[at.name] = self._fetch(at.name, value)
                if not isinstance(value, nn.Parameter):
                    at.write(arrived[at.name])
                elif value.shape != arrived[at.name].shape:  # once for all places of a tied one
                    own.append((value, self._swap(value, arrived[at.name])))
            yield
        finally:
            self._inside = False
            if self._use_whole is not None:
                self._use_whole(False)
            for at, value in before:
                if not isinstance(value, nn.Parameter):
                    at.write(value)
            for param, data in own:
                self._swap(param, data)

    def _fetch(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if name in self._everywhere:
            return self._read(name)
        source = self._source[name]
        if self.axis.rank == source:
            tensor = self._read(name).detach().contiguous()
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
    found: list[_Attribute] = []
    for owner in module.modules():
        for attribute, param in owner._parameters.items():
            if param is not None:
                found.append(_Attribute(weakref.ref(owner), attribute, names[id(param)]))
    return found
