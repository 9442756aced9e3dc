"""The loop of a serving role: all its ranks take a call together, and the first rank of each row line answers."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from hf_dist.dist import collectives
from hf_dist.dist.excepthook import lost_peer
from hf_dist.dist.link import Link, Message
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.dist.roles import Place
from hf_dist.dist.wires import GroupWire
from hf_dist.errors import RemoteError
from hf_dist.remote.routes import END, failure_of, rounds, students_of

__all__ = ["PATIENCE", "Call", "Calls", "Server", "serve"]

PATIENCE = timedelta(days=7)
"""How long a role waits for the next call: users tokenise, evaluate and generate between two."""


class Call:
    """One call of one data rank of the asking role, on every rank of the serving role that computes it."""

    def __init__(
        self, student: int, header: Mapping[str, Any], tensors: Sequence[Tensor], device: torch.device
    ) -> None:
        self.student = student
        self.name: str = header["call"]
        self.number: int = header["number"]
        self.options: Mapping[str, Any] = header["options"]
        self.tensors = {name: t.to(device) for name, t in zip(header["names"], tensors, strict=True)}
        self.counts = True
        """Whether somebody waits for the answer; else this rank only joins in the collectives of the others."""


Calls = Mapping[str, Callable[[Call], Message]]
"""Name of a call -> what answers it: a header and tensors."""


Release = Callable[[int, Sequence[int]], None]
"""Frees what calls of a data rank of the asking role, with these numbers, have left."""


class Server:
    """This rank's end towards the asking role. Every rank of the serving role has one."""

    def __init__(self, place: Place, mesh: ParallelMesh) -> None:
        """Meet the asking role; waits for it. `mesh`: of the serving role."""
        self.mesh = self._mesh = mesh
        self._store, self._role = place.store, place.role.name
        role, servers = place.role.name, mesh.data.size
        if place.rank == 0:
            place.store.set(f"roles/{role}/servers", str(servers))
        place.store.wait([f"roles/{role}/students"], PATIENCE)
        self.students = students = int(place.store.get(f"roles/{role}/students"))
        """Data ranks of the asking role."""
        self._mine = students_of(mesh.data.rank, students, servers)
        self._rounds = rounds(students, servers)
        self._leads = mesh.views["batch"].rank == 0
        self._links: dict[int, Link] = {}
        if self._leads:
            self._links = {
                s: Link(GroupWire(place.store, f"{role}/{s}", 0, PATIENCE), f"data rank {s} of the asking role")
                for s in self._mine
            }

    def serve_one(self, calls: Calls, release: Release) -> bool:
        """Take one call of every student and answer all. Whether there may be more. Every rank of the role calls it."""
        for turn in range(self._rounds):
            student = self._mine[turn] if turn < len(self._mine) else None
            header, tensors = self._taken(student)
            kinds = collectives.all_gather_object(self._mesh.world, _outline(student, header, tensors))
            asked = [kind for kind in kinds if kind is not None]
            if any(kind["call"] == END for kind in asked):
                return False
            if len({kind["call"] for kind in asked}) > 1:
                raise RemoteError(
                    f"the data ranks of the asking role make different calls: {[k['call'] for k in asked]}"
                )
            for kind in asked:  # with whatever call comes next, on every rank
                release(kind["student"], kind["header"]["dropped"])
            call = self._call(student, header, tensors, asked[0])
            self._answer(calls, call)
        return True

    def _taken(self, student: int | None) -> tuple[dict[str, Any] | None, list[Tensor]]:
        """What a student has sent, on every rank of this line."""
        if student is None:
            return None, []
        message = self._links[student].receive() if self._leads else None
        return collectives.broadcast_object(self._mesh.views["batch"], message)

    def _call(self, student: int | None, header: Any, tensors: list[Tensor], example: Mapping[str, Any]) -> Call:
        if header is not None:
            assert student is not None
            return Call(student, header, tensors, self._mesh.device)
        stand_in = Call(
            -1, example["header"], [torch.ones(s, dtype=d) for s, d in example["tensors"]], self._mesh.device
        )
        stand_in.counts = False
        return stand_in

    def _answer(self, calls: Calls, call: Call) -> None:
        """Compute and send."""
        try:
            answer = calls[call.name](call)
        except Exception as error:  # whatever it is, the asking role is told
            self._tell(error, call)
            raise
        if self._leads and call.counts:
            self._links[call.student].send(*answer)

    def _tell(self, error: Exception, call: Call) -> None:
        """Tell the asking role of an error here. Its end then ends this process, and with it those that wait for this one."""
        if lost_peer(error):
            return  # the rank that is lost has told
        lines = traceback.format_exc().rstrip().splitlines()
        problem = {"error": f"{type(error).__name__}: {error}", "stack": lines, "rank": self._mesh.world.rank}
        # Ranks of the asking role whose server waits for this one read it there.
        self._store.compare_set(failure_of(self._role), "", json.dumps(problem))
        if self._leads and call.counts:
            self._links[call.student].send(problem)
            self._links[call.student].receive()


def _outline(student: int | None, header: Mapping[str, Any] | None, tensors: Sequence[Tensor]) -> dict[str, Any] | None:
    """What another rank needs to join in: the call, and one row like those."""
    if header is None:
        return None
    rows = [((1, *t.shape[1:]) if t.dim() else (), t.dtype) for t in tensors]
    return {"student": student, "call": header["call"], "header": header, "tensors": rows}


def serve(server: Server, calls: Calls, release: Release) -> int:
    """Answer until the asking role has ended. Every rank of the serving role calls it. Returns how many calls were answered.

    `release(student, numbers)`: frees what these calls of a data rank have left, because it has dropped that.
    Raises `RemoteError` if the asking role is gone without a word, or its data ranks make different calls.
    """
    count = 0
    while server.serve_one(calls, release):
        count += 1
    return count
