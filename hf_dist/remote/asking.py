"""This rank's end towards a serving role: calls are sent in order by one thread, and their answers are waited for when read."""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

from torch import Tensor

from hf_dist.dist.axes import Axes
from hf_dist.dist.excepthook import print_error
from hf_dist.dist.link import Link, Message
from hf_dist.dist.rendezvous import DEFAULT_TIMEOUT
from hf_dist.dist.roles import Place
from hf_dist.dist.wires import GroupWire
from hf_dist.errors import RemoteError
from hf_dist.remote.routes import END, failure_of, server_of

__all__ = ["Asker", "Way", "asker_of"]

_askers: dict[str, Asker] = {}
_FAREWELL = 60.0
"""Seconds in which a role takes the last word."""


class Way(Protocol):
    """How a data rank of the asking role reaches the role."""

    def link(self, timeout: timedelta) -> Link:
        """Its link; waits for the other end. `timeout`: of an answer."""

    def tell(self, problem: Mapping[str, Any]) -> None:
        """Let the other ranks of the asking role know of an error that the role has sent here."""

    def failure(self) -> Mapping[str, Any] | None:
        """The error of the role that another rank knows of, asked when the link is lost."""


def asker_of(
    place: Place,
    role: str,
    axes: Axes,
    tells_after: float = 0.0,
    way: Callable[[int, int, bool], Way] | None = None,
) -> Asker:
    """The one end of this process towards `role`. `axes`: of the asking role; `tells_after`: see `Asker`.

    `way(student, students, leads)`: how this rank reaches the role; None: through the store of the start.
    """
    if role not in _askers:
        student, students = axes.coordinate("data", place.rank), axes.size("data")
        leads = axes.coordinate("batch", place.rank) == 0
        made = InStart(place.store, role, student, students) if way is None else way(student, students, leads)
        _askers[role] = Asker(place, role, made, leads=leads, tells_after=tells_after)
    return _askers[role]


class InStart:
    """The way to a role of the same start: both ends meet in its store."""

    def __init__(self, store: Any, role: str, student: int, students: int) -> None:
        self._store, self._role, self._student, self._students = store, role, student, students

    def link(self, timeout: timedelta) -> Link:
        """The link; waits for the role."""
        store, keys = self._store, [f"roles/{self._role}/{side}" for side in ("students", "servers")]
        if self._student == 0:
            store.set(keys[0], str(self._students))
        store.wait(keys, timeout)
        server = server_of(self._student, self._students, int(store.get(keys[1])))
        wire = GroupWire(store, f"{self._role}/{self._student}", 1, timeout)
        return Link(wire, f"data rank {server} of role {self._role}")

    def tell(self, problem: Mapping[str, Any]) -> None:
        """Nothing: the role has written it there."""

    def failure(self) -> Mapping[str, Any] | None:
        """What the role has written."""
        key = failure_of(self._role)
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


class Asker:
    """Every data rank of the asking role has one, and all make the same calls in the same order."""

    def __init__(
        self,
        place: Place,
        role: str,
        way: Way,
        *,
        leads: bool = True,
        timeout: timedelta = DEFAULT_TIMEOUT,
        tells_after: float = 0.0,
    ) -> None:
        """`leads`: whether this rank asks for those that share its rows; the others have an end that says nothing.

        `timeout`: of an answer; `tells_after`: seconds after which a rank that waits says so, ever rarer; 0: never."""
        self.role = role
        self._place, self.way, self._timeout = place, way, timeout
        self._tells_after = tells_after
        self._leads = leads
        self._link: Link | None = None
        self._waiting: SimpleQueue[tuple[Future[Message], Mapping[str, object], Sequence[Tensor]] | None] = (
            SimpleQueue()
        )
        # Not an executor's: those take nothing more once the interpreter begins to end, and the last word is said then.
        self._thread = threading.Thread(target=self._run, name=f"hf_dist asks {role}", daemon=True)
        self._thread.start()
        self._dropped: list[int] = []
        self._lock = threading.Lock()
        self._calls = 0
        self._closed = False
        atexit.register(self.close)

    def ask(self, call: str, tensors: Mapping[str, Tensor], **options: object) -> tuple[Future[Message], int]:
        """Send a call: the answer, which comes later, and the number of the call. `options`: plain values, for the header."""
        if self._closed:
            raise RemoteError(f"role {self.role} was told that the job is over: it answers no more calls")
        with self._lock:
            dropped, self._dropped = self._dropped, []
            self._calls += 1
            number = self._calls
        header = {"call": call, "number": number, "names": list(tensors), "dropped": dropped, "options": options}
        future: Future[Message] = Future()
        self._waiting.put((future, header, [t.detach() for t in tensors.values()]))
        return future, number

    def wait(self, future: Future[Message]) -> Message:
        """The answer. Raises `RemoteError` if the role has raised, has ended, or does not answer in time."""
        waited, pause = 0.0, self._tells_after
        while True:
            try:
                return future.result(pause or None)
            except FutureTimeout:
                if future.done():
                    raise
            waited, pause = waited + pause, waited + pause
            me, calls = f"{self._place.role.name} rank {self._place.rank}", f"call {self._calls}"
            print_error(
                f"hf_dist: {me} has waited {waited:.0f} s for role {self.role} to answer {calls}; it gives up after "
                f"{self._timeout.total_seconds():.0f} s"
            )

    def _run(self) -> None:
        """Of the thread: one call after another; after an error of the link, every call has that error."""
        broken: BaseException | None = None
        while (item := self._waiting.get()) is not None:
            future, header, tensors = item
            if broken is not None:
                future.set_exception(broken)
                continue
            try:
                future.set_result(self._exchange(header, tensors))
            except BaseException as error:
                future.set_exception(error)
                broken = error if self._link is None or self._link.is_broken else None

    def _exchange(self, header: Mapping[str, object], tensors: Sequence[Tensor]) -> Message:
        if self._link is None:
            self._link = self.way.link(self._timeout)
        try:
            self._link.send(header, tensors)
            if header["call"] == END:
                return {}, []
            answer, found = self._link.receive()
        except RemoteError as lost:
            problem = None if header["call"] == END else self.way.failure()
            if problem is None:
                raise
            raise self._failure(problem) from lost
        if "error" in answer:
            if not answer.get("goes_on"):
                self.way.tell(answer)
            raise self._failure(answer)
        return answer, found

    def _failure(self, problem: Mapping[str, Any]) -> RemoteError:
        stack = (f"  [{self.role} {problem['rank']}] {line}" for line in problem["stack"])
        return RemoteError(f"role {self.role}, rank {problem['rank']}: {problem['error']}\n" + "\n".join(stack))

    def drop(self, number: int) -> None:
        """Tell the role, with the next call, that it need not keep what call `number` has left there. Any thread."""
        with self._lock:
            self._dropped.append(number)

    @property
    def sent_nbytes(self) -> int:
        """Bytes of tensors sent so far."""
        return 0 if self._link is None else self._link.sent_nbytes

    @property
    def received_nbytes(self) -> int:
        """Bytes of tensors received so far."""
        return 0 if self._link is None else self._link.received_nbytes

    def close(self) -> None:
        """Tell the role that no call will follow. Idempotent; runs at the end of the process, too."""
        if self._closed:
            return
        if not self._leads:
            self._closed = True
            self._waiting.put(None)
            return
        last, _ = self.ask(END, {})
        self._closed = True
        self._waiting.put(None)
        with contextlib.suppress(Exception):  # it has ended already
            last.result(timeout=_FAREWELL)
        _askers.pop(self.role, None)
