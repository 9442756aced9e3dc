"""The loop of a serving role: all its ranks take a call together, and the first rank of each row line answers."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_dist.dist import collectives
from hf_dist.dist.excepthook import lost_peer
from hf_dist.dist.link import Link, Message
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.dist.roles import Place
from hf_dist.dist.wires import GroupWire
from hf_dist.errors import ModelError, RemoteError
from hf_dist.remote.routes import END, LOST, PATIENCE, failure_of, rounds, students_of

__all__ = ["Call", "Calls", "JobGone", "RefusedCall", "Release", "Server", "Students", "serve"]


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


class RefusedCall(ModelError):
    """A call that every rank of the role refuses alike, before any of them computes for it."""


class JobGone(RemoteError):
    """The asking role is gone without a word, or has sent what is no call. Every rank of the role raises it together."""


class Students(Protocol):
    """The data ranks of the asking role, as one rank that answers some of them reaches them."""

    count: int
    outlived: bool
    """Whether the serving role goes on when they are gone."""

    def receive(self, student: int) -> Message:
        """What a student has sent; waits for it. Raises `RemoteError` if it is gone."""

    def send(self, student: int, header: Mapping[str, object], tensors: Sequence[Tensor] = ()) -> None:
        """Answer a student. Raises `RemoteError` if it is gone."""

    def gone(self, why: str) -> None:
        """Tell the other ranks of this role, which may wait for students of theirs, that one is gone."""


class InStart:
    """Those of the same start: both ends meet in its store."""

    outlived = False

    def __init__(self, place: Place, servers: int) -> None:
        """Meet the asking role; waits for it. `servers`: data ranks of this role."""
        self._place, self._role = place, place.role.name
        if place.rank == 0:
            place.store.set(f"roles/{self._role}/servers", str(servers))
        place.store.wait([f"roles/{self._role}/students"], PATIENCE)
        self.count = int(place.store.get(f"roles/{self._role}/students"))
        self._links: dict[int, Link] = {}

    def meet(self, mine: Sequence[int]) -> None:
        """Make the links with these students; waits for them."""
        for s in mine:
            wire = GroupWire(self._place.store, f"{self._role}/{s}", 0, PATIENCE)
            self._links[s] = Link(wire, f"data rank {s} of the asking role")

    def receive(self, student: int) -> Message:
        """What a student has sent."""
        return self._links[student].receive()

    def send(self, student: int, header: Mapping[str, object], tensors: Sequence[Tensor] = ()) -> None:
        """Answer a student."""
        self._links[student].send(header, tensors)

    def gone(self, why: str) -> None:
        """Nothing: this process ends, and the others notice."""


class Server:
    """This rank's end towards the asking role. Every rank of the serving role has one."""

    def __init__(self, place: Place, mesh: ParallelMesh, students: Students | None = None) -> None:
        """`mesh`: of the serving role. `students`: who asks; None: the asking role of this start, which is waited for."""
        self.mesh = self._mesh = mesh
        self._store, self._role = place.store, place.role.name
        self._leads = mesh.views["batch"].rank == 0
        servers = mesh.data.size
        asking = InStart(place, servers) if students is None else students
        self.students = asking.count
        """Data ranks of the asking role."""
        self._mine = students_of(mesh.data.rank, asking.count, servers)
        self._rounds = rounds(asking.count, servers)
        if isinstance(asking, InStart) and self._leads:
            asking.meet(self._mine)
        self._asking: Students = asking

    def serve_one(self, calls: Calls, release: Release) -> bool:
        """Take one call of every student and answer all. Whether there may be more. Every rank of the role calls it."""
        for turn in range(self._rounds):
            student = self._mine[turn] if turn < len(self._mine) else None
            header, tensors = self._taken(student)
            kinds = collectives.all_gather_object(self._mesh.world, _outline(student, header, tensors))
            asked = [kind for kind in kinds if kind is not None]
            if any(kind["call"] == END for kind in asked):
                return False
            self._check_together(asked, student)
            for kind in asked:  # with whatever call comes next, on every rank
                release(kind["student"], kind["header"]["dropped"])
            call = self._call(student, header, tensors, asked[0])
            self._answer(calls, call)
        return True

    def _taken(self, student: int | None) -> tuple[dict[str, Any] | None, list[Tensor]]:
        """What a student has sent, on every rank of this line."""
        if student is None:
            return None, []
        message = self._received(student) if self._leads else None
        return collectives.broadcast_object(self._mesh.views["batch"], message)

    def _received(self, student: int) -> Message:
        try:
            return self._asking.receive(student)
        except RemoteError as lost:
            if not self._asking.outlived:
                raise
            self._asking.gone(str(lost))
            return {"call": LOST, "number": 0, "names": [], "dropped": [], "options": {"why": str(lost)}}, []

    def _check_together(self, asked: Sequence[Mapping[str, Any]], student: int | None) -> None:
        """Raise `JobGone`, on every rank, if one of the students is gone, or they do not make the same call."""
        lost = [kind["header"]["options"]["why"] for kind in asked if kind["call"] == LOST]
        if lost:
            raise JobGone(lost[0])
        if len({kind["call"] for kind in asked}) > 1:
            different = JobGone(f"the data ranks of the asking role make different calls: {[k['call'] for k in asked]}")
            if self._asking.outlived and self._leads and student is not None:
                self._sent(student, self._problem(different))
            raise different

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
            if call.name not in calls:
                raise RefusedCall(f"role {self._role} answers no {call.name!r}; it answers {', '.join(calls)}")
            answer = calls[call.name](call)
        except Exception as error:  # whatever it is, the asking role is told
            goes_on = isinstance(error, RefusedCall) and self._asking.outlived
            if not goes_on:
                self._tell(error, call)
                raise
            answer = {**self._problem(error), "goes_on": True}, []
        if self._leads and call.counts:
            self._sent(call.student, *answer)

    def _sent(self, student: int, header: Mapping[str, object], tensors: Sequence[Tensor] = ()) -> None:
        """Send; that a student is gone whom this role outlives is found when it is asked for its next call."""
        with contextlib.suppress(*([RemoteError] if self._asking.outlived else [])):
            self._asking.send(student, header, tensors)

    def _problem(self, error: Exception) -> dict[str, Any]:
        lines = [] if error.__traceback__ is None else "".join(traceback.format_exception(error)).rstrip().splitlines()
        return {"error": f"{type(error).__name__}: {error}", "stack": lines, "rank": self._mesh.world.rank}

    def _tell(self, error: Exception, call: Call) -> None:
        """Tell the asking role of an error here. Its end then ends this process, and with it those that wait for this one."""
        problem, key = self._problem(error), failure_of(self._role)
        if not lost_peer(error):
            # Ranks of the asking role whose server waits for this one read it there.
            self._store.compare_set(key, "", json.dumps(problem))
        elif not self._asking.outlived:
            return  # the rank that is lost has told
        elif self._store.check([key]):  # another job does not read the store
            problem = json.loads(self._store.get(key))
        if self._leads and call.counts:
            self._sent(call.student, problem)
            if not self._asking.outlived:
                self._asking.receive(call.student)


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
