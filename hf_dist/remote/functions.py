"""Calls of functions in a role, by name from an allow-list; what they return stays there until the caller has dropped it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hf_dist.dist import collectives
from hf_dist.dist.link import Message
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.errors import ModelError
from hf_dist.remote.serving import Call, Calls, RefusedCall
from hf_dist.remote.values import decoded, encoded

__all__ = ["Functions", "is_allowed", "name_of"]


def name_of(function: str | Callable[..., Any]) -> str:
    """`module:function`. Raises `ModelError` for what another process cannot import."""
    if isinstance(function, str):
        return function
    module, name = function.__module__, function.__qualname__
    if module == "__main__" or "<" in name or "." in name:
        raise ModelError(
            f"remote_call: {name} of {module} cannot be imported in another process: put it at the top level of a module"
        )
    return f"{module}:{name}"


def is_allowed(name: str, allowed: Sequence[str]) -> bool:
    """Whether `name` is in the list, by itself or by its module."""
    return name in allowed or name.partition(":")[0] in allowed


class Functions:
    """What functions have returned on this rank of a role."""

    def __init__(self, mesh: ParallelMesh, allowed: Sequence[str], role: str) -> None:
        """`allowed`: "module:function", or "module" for all of a module's functions. `mesh`: of the role."""
        self._mesh, self._allowed, self._role = mesh, allowed, role
        self._objects: dict[int, Any] = {}
        self._last = 0

    @property
    def calls(self) -> Calls:
        """Name -> what answers it. Every rank of the role makes each call."""
        return {"call": self.call, "value": self.value, "free": self.free}

    def release(self, student: int, numbers: Sequence[int]) -> None:
        """Forget what these calls have returned. All data ranks make the same calls, so the first one's word counts. Local."""
        for number in numbers if student == 0 else ():
            self._objects.pop(number, None)

    def call(self, call: Call) -> Message:
        """Run a function once on every rank, with the arguments of the first data rank that asks; keep the result."""
        if call.number > self._last:
            self._last = call.number
            mine = (dict(call.options), list(call.tensors.values())) if self._mesh.world.rank == 0 else None
            options, tensors = collectives.broadcast_object(self._mesh.world, mine)
            self._objects[call.number] = self._run(options, [tensor.to(self._mesh.device) for tensor in tensors])
        return {"value": None}, []

    def _run(self, options: dict[str, Any], tensors: list[Tensor]) -> Any:
        function = self._function(options["function"])
        arguments, named = (decoded(options[key], tensors, self._object) for key in ("arguments", "named"))
        return function(*arguments, **named)

    def _function(self, name: str) -> Callable[..., Any]:
        if not is_allowed(name, self._allowed):
            raise RefusedCall(
                f"{name} is not in hf_dist.roles.{self._role}.functions ({', '.join(self._allowed) or 'which is empty'})"
            )
        module, _, attribute = name.partition(":")
        found = getattr(importlib.import_module(module), attribute, None)
        if not callable(found) or (name not in self._allowed and getattr(found, "__module__", "") != module):
            raise ModelError(f"{module} defines no function {attribute}")
        function: Callable[..., Any] = found
        return function

    def _object(self, number: int) -> Any:
        if number not in self._objects:
            raise ModelError(f"the result of call {number} was freed")
        return self._objects[number]

    def value(self, call: Call) -> Message:
        """A result, as rank `rank` of the role has it."""
        tensors: list[Tensor] = []
        spec, source = None, call.options["rank"]
        if self._mesh.world.rank == source:
            found = self._object(call.options["of"])
            spec = encoded(found, tensors, f"the result of call {call.options['of']} on rank {source} of {self._role}")
            tensors = [tensor.detach().cpu() for tensor in tensors]
        spec, tensors = collectives.broadcast_object(self._mesh.world, (spec, tensors), source)
        return {"value": spec}, tensors

    def free(self, call: Call) -> Message:
        """Forget a result now."""
        self._objects.pop(call.options["of"], None)
        return {"value": None}, []
