"""A forward outside a schedule (`generate`, a probe): every rank runs every block, with weights fetched for each call.

Slow, because every call sends weights, but any code around the model works: caches, encoders called alone, sampling loops.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis
from hf_dist.errors import ModelError
from hf_dist.log import say_once
from hf_dist.parallel.pipeline.stage_plan import StagePlan
from hf_dist.tensors.checksum import as_bytes
from hf_dist.tensors.tensor_slice import TensorSlice

__all__ = ["Visits"]


@dataclass(frozen=True)
class _Attribute:
    """The place of a parameter in the visited subtree: a module and its attribute."""

    _owner: weakref.ref[nn.Module]  # weak: the modules hold the `Visits`
    attribute: str
    name: str
    """Name of the parameter in the whole model."""

    def read(self) -> torch.Tensor:
        owner: Any = self._owner()
        own: torch.Tensor | None = owner._parameters.get(self.attribute)  # even if a property of the class hides it
        value: torch.Tensor = getattr(owner, self.attribute) if own is None else own
        return value

    def write(self, value: torch.Tensor) -> None:
        setattr(self._owner(), self.attribute, value)


class Visits:
    """Brings the parameters of a module to all pipeline ranks for the duration of a call."""

    def __init__(
        self,
        model: nn.Module,
        plan: StagePlan,
        axis: MeshAxis,
        compute_dtype: Callable[[str, torch.dtype], torch.dtype],
    ) -> None:
        """`model`: before its parameters are dropped. `axis`: pp. `compute_dtype`: as for `StagedModel`. Local."""
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
        """Keep these parameters as `slices` inside visits too: those of experts, to which tokens are sent. Local."""
        for name, held in slices.items():
            self._shapes[name] = self._shapes[name][0], held.shape

    def read_with(
        self,
        read: Callable[[str], torch.Tensor],
        swap: Callable[[nn.Parameter, torch.Tensor], torch.Tensor],
        use_whole: Callable[[bool], None] | None,
    ) -> None:
        """Set how this rank's parameters are made whole for a visit. Local.

        `read(name)`: returns the parameter for the visit; collective over the ranks of its stage that share it. `swap(param,
        data)`: sets `.data` and returns the old one. `use_whole`: for a model cut along `tp`, called with True when it starts
        to compute with whole parameters and with False when it stops.
        """
        self._read, self._swap, self._use_whole = read, swap, use_whole

    @contextmanager
    def __call__(self, path: str) -> Iterator[None]:
        """Inside, the module at `path` has all its parameters on every rank. Collective over pp, in the same order.

        Raises `ModelError` if gradients are enabled, or if code around the modules reads a parameter directly.
        """
        if self._inside:  # the parameters of submodules came with the visited module
            yield
            return
        self._check()
        say_once(
            "a forward outside the pipeline's schedule (generate, for example): every rank runs all blocks, and every call "
            "sends weights between the stages; correct, but slow"
        )
        self._inside = True
        # Parameters that every stage holds need no fetch, unless the model is cut along tp: then all must be whole.
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
                elif value.shape != arrived[at.name].shape:  # once for all places of a tied parameter
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
        collectives.broadcast(self.axis, as_bytes(tensor), source)
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
