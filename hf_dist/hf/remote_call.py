"""`hf_dist.remote_call`: a function runs on every rank of a role; its result stays there, and is referred to here."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from hf_dist.config import axes_of
from hf_dist.dist import collectives
from hf_dist.dist.link import Message
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.errors import ConfigError, ModelError, Problem
from hf_dist.hf.roles import asking_config, reached
from hf_dist.remote.asking import Asker
from hf_dist.remote.functions import is_allowed, name_of
from hf_dist.remote.values import decoded, encoded

__all__ = ["Reference", "know_mesh", "remote_call"]

_known: weakref.ref[ParallelMesh] | None = None
"""Of the last engine; it dies with its Trainer."""


def know_mesh(mesh: ParallelMesh) -> None:
    """Tell which ranks read the same rows as this one. Local."""
    global _known
    _known = weakref.ref(mesh)


def remote_call(role: str, function: str | Callable[..., Any], *arguments: Any, **named: Any) -> Reference:
    """Run an importable function on every rank of a role; a reference to what it returns there. Returns at once.

    `function`: "module:function" or the function, which `hf_dist.roles.ROLE.functions` of the JSON allows by itself or by its
    module. Arguments: tensors, numbers, strings, lists, dicts, and references to results in the same role. Every rank of the
    trainer makes the call, and the first data rank's arguments count. Raises `ConfigError` for a function that is not allowed;
    an exception there is raised where a result is asked for, as `RemoteError` with its role, rank and stack.
    """
    roles, place, config = asking_config(role)
    name = name_of(function)
    if not roles[role].job:
        _check_allowed(role, name, roles[role].functions)
    axes = axes_of(config, place.role.size)
    shares, mesh = axes.size("batch") > 1, None if _known is None else _known()
    if shares and mesh is None:
        raise ModelError("remote_call: ranks share rows, so prepare a model first: the ranks then know their groups")
    asker, offer = reached(role, roles[role], place, config)
    if offer is not None:
        _check_allowed(role, name, offer.functions)
    ends = _Ends(asker, place.roles[role].size if offer is None else offer.ranks, mesh if shares else None)
    tensors: list[Tensor] = []
    options = {
        "function": name,
        "arguments": encoded(list(arguments), tensors, f"the arguments of {name}"),
        "named": encoded(named, tensors, f"the arguments of {name}"),
    }
    sent = tensors if axes.coordinate("data", place.rank) == 0 else []
    future, number = ends.ask("call", {str(i): t for i, t in enumerate(sent)}, options)
    return Reference(ends, future, number, name)


def _check_allowed(role: str, name: str, allowed: Sequence[str]) -> None:
    if not is_allowed(name, allowed):
        found, fix = ", ".join(allowed) or "[]", f'Add "{name}" to it.'
        raise ConfigError(Problem(f"hf_dist.roles.{role}.functions", found, f"does not allow {name}", fix))


class Reference:
    """The result of a call, in a role. Dropping the last one frees the result there with the next call; `free` at once."""

    def __init__(self, ends: _Ends, future: Future[Message] | None, number: int, name: str) -> None:
        self._ends, self._future, self.number, self._name = ends, future, number, name
        self._finalizer = weakref.finalize(self, ends.asker.drop, number)

    def get(self, rank: int = 0) -> Any:
        """What rank `rank` of the role has: tensors, plain values, lists and dicts. Every rank of the trainer calls it."""
        if not 0 <= rank < self._ends.ranks:
            raise ModelError(f"role {self._ends.asker.role} has ranks 0 to {self._ends.ranks - 1}, and no rank {rank}")
        self.wait()
        header, tensors = self._ends.answer(self._ends.ask("value", {}, {"of": self.number, "rank": rank})[0])

        def nothing(number: int) -> Any:
            raise ModelError(f"the result of {self._name} refers to that of call {number}: ask for that one")

        return decoded(header["value"], tensors, nothing)

    def wait(self) -> None:
        """Wait until the function has returned. Raises `RemoteError` if it has raised."""
        future, self._future = self._future, None
        if future is not None:
            self._ends.asker.wait(future)

    def free(self) -> None:
        """Free the result now. Every rank of the trainer calls it."""
        if self._finalizer.detach() is not None:
            self._ends.answer(self._ends.ask("free", {}, {"of": self.number})[0])


class _Ends:
    """This rank's end towards a role, and the ranks that share its answers."""

    def __init__(self, asker: Asker, ranks: int, mesh: ParallelMesh | None) -> None:
        self.asker = asker
        self.ranks = ranks
        self._line = None if mesh is None else mesh.views["batch"]

    def ask(
        self, call: str, tensors: Mapping[str, Tensor], options: Mapping[str, Any]
    ) -> tuple[Future[Message] | None, int]:
        if self._line is not None and self._line.rank != 0:
            return None, 0
        return self.asker.ask(call, tensors, **options)

    def answer(self, future: Future[Message] | None) -> Message:
        message = None if future is None else self.asker.wait(future)
        if self._line is not None:
            message = collectives.broadcast_object(self._line, message)
        assert message is not None
        return message
