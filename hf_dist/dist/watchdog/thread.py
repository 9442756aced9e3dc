"""The watchdog's thread: says now and then where this rank is, and on two ranks judges what all of them said."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hf_dist import log
from hf_dist.dist import (
    collective_guard,
    comm_counter,
    excepthook,
    host_info,
    mesh,
)
from hf_dist.dist.launch import detect_launch
from hf_dist.dist.watchdog.departure import Departure, Told
from hf_dist.dist.watchdog.location import Location, find_location
from hf_dist.dist.watchdog.own_time import OwnTime
from hf_dist.dist.watchdog.report import (
    Status,
    called_alone,
    describe_stall,
    ended_first,
    lost_rank,
    numbers,
    unheeded,
    who_is_late,
)
from hf_dist.dist.watchdog.slow_rank import SlowRanks
from hf_dist.dist.watchdog.wire import Collector, Sender

__all__ = ["STOPPED", "end_window", "obey", "start", "verdict", "watch"]

STOPPED = 75
"""Exit code of a job that a signal has ended and that may be started again: EX_TEMPFAIL of sysexits.h."""
_KEY = "hf_dist/watchdog"
_SILENT_TICKS = 3
_HEED_SECONDS = 10.0
"""How long a job that was told to end may stand still: schedulers kill after half a minute."""
_ALONE_SECONDS = 60.0
"""The `limit` of one process, which waits for nobody."""
_watchdog: Watchdog | None = None


def start(seconds: float) -> None:
    """Report when a rank has waited for the others for `seconds`; 0: never. Local, and may be called again.

    After torch.distributed was started. Does nothing in a job of one process.
    """
    global _watchdog
    launch = detect_launch()
    store = mesh.job_store()
    if _watchdog is not None:
        _watchdog.limit = seconds
    elif seconds > 0 and launch.world_size > 1 and store is not None:
        _watchdog = Watchdog(seconds, launch.rank, launch.world_size, store)
        _watchdog.start()


def _forget() -> None:
    """In a forked child, which has no such thread."""
    global _watchdog
    _watchdog = None


os.register_at_fork(after_in_child=_forget)


def watch(engine: object) -> None:
    """Have reports name the modules of `engine.model`, its step, and where the caller's thread is. Engines are held weakly."""
    if _watchdog is not None:
        _watchdog.engines.add(engine)
        _watchdog.thread = threading.get_ident()
        _watchdog.introduce()


def end_window(step: int, own: Mapping[str, float], *, wall: float, mixed: float = 0.0) -> None:
    """A log window of `wall` seconds has ended after `step` optimizer steps. `own`: phase -> seconds without waits for other
    ranks; `mixed`: seconds that may hold some. Every rank calls it at the same steps. Local."""
    if _watchdog is not None:
        _watchdog.own_time.add(step, own, wall=wall, mixed=mixed)


def verdict() -> str:
    """What is wrong with the job, as far as this rank judges: who is late, or who has ended; "" if nothing is. Local."""
    return "" if _watchdog is None else _watchdog.verdict


def obey(told: Told) -> None:
    """End the job, with exit code 75, if `told` has heard SIGTERM and no rank moves. `told` is held weakly. Local."""
    global _watchdog
    if _watchdog is None and detect_launch().world_size == 1:
        _watchdog = Watchdog(_ALONE_SECONDS, 0, 1, None)
        _watchdog.start()
    if _watchdog is not None:
        _watchdog.told = weakref.ref(told)


class Watchdog(threading.Thread):
    """One per process. Ranks 0 and the last one listen; the other speaks where rank 0 has gone silent."""

    def __init__(self, limit: float, rank: int, world: int, store: Any) -> None:
        super().__init__(name="hf_dist watchdog", daemon=True)
        self.limit = limit
        """Seconds of waiting after which there is a report."""
        self.rank = rank
        self.world = world
        self.engines: weakref.WeakSet[Any] = weakref.WeakSet()
        self.thread = threading.get_ident()
        """The one that trains: not the main thread where Ray Train runs the loop, and that one only waits."""
        self._store = store
        self.told: weakref.ref[Told] | None = None
        self._told_at: float | None = None
        self._listeners = (0, world - 1) if store is not None else ()
        self._collector: Collector | None = None
        self._senders: dict[int, Sender] = {}
        self._names: dict[int, str] = {}
        self._named: weakref.WeakSet[object] = weakref.WeakSet()
        self._seen: tuple[Any, ...] = ()
        self._since = time.monotonic()
        self._departure = Departure()
        self._report = ""
        self._goodbyes: set[int] = set()
        self._next_report = 0.0
        self._stalled_at: float | None = None
        self.own_time = OwnTime(self.tick)
        self._slow = SlowRanks()
        self._kills = host_info.memory_kills()
        self._ends = threading.Event()
        self._sending = threading.Lock()
        if rank in self._listeners:
            token = uuid.uuid4().hex
            address = mesh.own_address()
            self._collector = Collector(token, address, world)
            self._store.set(self._key(rank), json.dumps([address, self._collector.port, token]))
        excepthook.on_leave(self.leave)
        excepthook.explain_with(self.explain_loss)
        if store is not None:
            excepthook.same_error_with(self._first_at)
        atexit.register(self.leave, "")
        os.register_at_fork(after_in_child=self._close)  # a data loader's worker would keep the connections open

    @property
    def verdict(self) -> str:
        """The head of the last report, while it holds, or which rank has ended."""
        return self._departure.reason or "; ".join(line.strip() for line in self._report.splitlines()[:2])

    @property
    def tick(self) -> float:
        """Seconds between two statuses."""
        if self._told_at is not None:
            return 1.0
        return 5.0 if self.limit <= 0 else min(5.0, max(0.2, self.limit / 12))

    def run(self) -> None:
        """Until the process ends. An error of ours must not disturb training: that look is left out, and the next one comes.

        Such as a dictionary of modules that the training thread changes while this one walks it.
        """
        while not self._ends.is_set():
            try:
                self._look()
            except (OSError, ValueError, RuntimeError):
                self._ends.wait(self.tick)

    def _look(self) -> None:
        status = self._status()
        self._tell({"status": status.as_dict})
        self._hear()
        if self.limit > 0 and self._departure.is_due(status, self.limit):
            excepthook.leave_waiting(self._departure.reason)
        pause = min(self.tick, 1.0) if self._departure.reason else self.tick
        if self._collector is None:
            if self.world == 1:
                self._end_if_unheeded([status])
            self._ends.wait(pause)
            return
        self._collector.poll(pause)
        if self.limit > 0:
            self._judge()

    # ------------------------------------------------------------------ speaking

    def _status(self) -> Status:
        location = self._location()
        # Without what it waits for: a GPU is asked only where the host has stood for a while, and that is no other place.
        seen = (comm_counter.num_started(), mesh.sequence_number(), replace(location, waits_for=""))
        if seen != self._seen:
            self._seen, self._since = seen, time.monotonic()
        step = max((e.global_steps for e in self.engines), default=-1)
        still = time.monotonic() - self._since
        told = self.told() if self.told is not None else None
        if told is None or not told.heard_to_end():
            self._told_at = None
        elif self._told_at is None:
            self._told_at = time.monotonic()
        return Status(
            self.rank,
            socket.gethostname(),
            os.getpid(),
            step=step,
            still=still,
            location=location,
            rss=host_info.resident_nbytes(),
            totals=self.own_time.totals,
            stage=max((e.mesh.pp.rank for e in self.engines), default=0),
            told=-1.0 if self._told_at is None else time.monotonic() - self._told_at,
        )

    def _location(self) -> Location:
        engines = list(self.engines)
        for engine in engines:
            if engine not in self._named:
                self._named.add(engine)
                self._names |= {id(module): name for name, module in engine.model.named_modules() if name}
        reached = [name for name in (e.sharded.passes.unit_in_backward for e in engines) if name is not None]
        location = find_location(self._names, reached[0] if reached else "", self.thread)
        patience = self._departure.grace if self._departure.reason else self.limit
        if not location.waits_for and mesh.device_is_busy(self._seconds_at(location) > patience / 2):
            # The host is in some line that reads a number from the GPU; what that waits for is a collective.
            location = replace(location, waits_for="a collective on the GPU")
        return location

    def _seconds_at(self, location: Location) -> float:
        before = self._seen[2] if self._seen else None
        return time.monotonic() - self._since if before is not None and before.stack == location.stack else 0.0

    def introduce(self) -> None:
        """Say that this rank is there, before it trains: one that dies in its first step is known by name and process.

        The thread may have looked before the listeners had said where they are. They have by now: engines are built together.
        """
        self._tell({"status": Status(self.rank, socket.gethostname(), os.getpid()).as_dict})

    def _tell(self, message: dict[str, object]) -> None:
        with self._sending:
            for rank in self._listeners:
                if rank not in self._senders and self._store.check([self._key(rank)]):
                    address, port, token = json.loads(self._store.get(self._key(rank)))
                    self._senders[rank] = Sender((address, port), token, self.rank)
            for sender in list(self._senders.values()):
                if not self._ends.is_set():
                    sender.send(message)

    def _hear(self) -> None:
        """What is known of ranks that have ended: by the two that listen from their connections, by the others from these."""
        for rank, sender in list(self._senders.items()):
            for message in sender.hear():  # the last rank listens, too, and rank 0 judges its calls
                if self.rank in message.get("alone", ()):
                    self._end_lone_call(str(message["text"]))
                if "stopped" in message:
                    excepthook.leave_stopped("", STOPPED)
                if "lost" in message and self._collector is None:
                    self._departure.note(str(message["lost"]), left_well=bool(message["left_well"]))
                elif message.get("left") == "":
                    self._goodbyes.add(rank)
        if self._collector is None:
            gone = [r for r, sender in self._senders.items() if not sender.is_open and r not in self._goodbyes]
            if gone and len(gone) == len(set(self._listeners)):
                self._departure.note(f"{numbers(gone)} ended without a word")
            return
        ended = [s for s in self._statuses() if s.ended]
        failed = [s for s in ended if s.last_words != ""]
        text = lost_rank(failed or ended, host_info.memory_report(self._kills)) or ""
        left_well = bool(ended) and not failed
        if self._departure.note(text, left_well=left_well):
            self._collector.send({"lost": text, "left_well": left_well})

    def _key(self, rank: int) -> str:
        return f"{_KEY}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{rank}"

    def leave(self, last_words: str) -> None:
        """Tell the others why this process ends; no more reports."""
        if self._ends.is_set():
            return
        self._ends.set()
        self._sending.acquire(timeout=2.0)  # the thread may be in the middle of a line
        if self._collector is not None:
            self._collector.send({"left": last_words})
        for sender in list(self._senders.values()):
            sender.send({"last_words": last_words})
            sender.close()

    def _close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        if self._collector is not None:
            self._collector.close()

    # ------------------------------------------------------------------- judging

    def _statuses(self) -> list[Status]:
        assert self._collector is not None
        now, here = time.monotonic(), socket.gethostname()
        statuses = []
        for rank, heard in sorted(self._collector.heard.items()):
            said = dict(heard.status.get("status", {}))
            location = dict(said.pop("location", {}))
            location["stack"] = tuple(location.get("stack", ()))
            local = said.get("host") == here and not heard.ended
            statuses.append(
                Status(
                    rank,
                    **said,
                    location=Location(**location),
                    silent=now - heard.at,
                    ended=heard.ended is not None,
                    last_words=heard.last_words,
                    state=host_info.process_state(said["pid"]) if local else "",
                )
            )
        return statuses

    def _judge(self) -> None:
        now, statuses = time.monotonic(), self._statuses()
        silence = _SILENT_TICKS * self.tick + 1
        first = next((s for s in statuses if s.rank == 0), None)
        if self.rank != 0 and first is not None and not first.ended and first.silent < silence:
            return  # rank 0 speaks
        for line in self._slow.name(statuses, self.world):
            log.warn(line)
        self._end_if_unheeded(statuses)
        alone = called_alone(statuses, patience=self.limit / 6, world=self.world)
        if alone is not None:
            assert self._collector is not None
            self._collector.send({"alone": alone[0], "text": alone[1]})
            if self.rank in alone[0]:
                self._end_lone_call(alone[1])
        report = describe_stall(statuses, limit=self.limit, silence=silence, world=self.world)
        self._report = report or ""
        if report is None:
            if self._stalled_at is not None:
                excepthook.print_error(
                    f"hf_dist watchdog: the job goes on, {now - self._stalled_at:.0f} s after the report"
                )
            self._stalled_at, self._next_report = None, 0.0
        elif now >= self._next_report:
            excepthook.print_error(report)
            began = self._stalled_at if self._stalled_at is not None else now
            self._stalled_at = began
            self._next_report = now + 2 * max(self.limit, now - began)  # ever rarer

    def _end_if_unheeded(self, statuses: list[Status]) -> None:
        if any(s.ended and s.last_words == excepthook.STOPPED for s in statuses):  # the other listener has said why
            excepthook.leave_stopped("", STOPPED)
        why = unheeded(statuses, _HEED_SECONDS, self.limit) if len(statuses) == self.world else None
        told = self.told() if self.told is not None else None
        if why is None:
            return
        last = told.last() if told is not None else ""
        saved = f"the newest checkpoint is {last}" if last else "there is no checkpoint"
        if self._collector is not None:
            self._collector.send({"stopped": True})
        excepthook.leave_stopped(f"hf_dist: {why}. Leaving without a save, with exit code {STOPPED}; {saved}.", STOPPED)

    def _end_lone_call(self, text: str) -> None:
        """This rank has made a call alone: its main thread raises, or this process leaves where that cannot.

        On a busy machine the same verdict may come again, after the script has caught the error: it goes on then.
        """
        location = self._location()
        if location.waits_for == "every rank to make the same call":
            collective_guard.report(text)
        elif location.called:
            excepthook.leave_alone(text)

    def _first_at(self, place: str) -> int:
        """The first rank that came to an error of this place."""
        digest = hashlib.sha256(place.encode()).hexdigest()[:16]
        key = f"{self._key(self.rank).rpartition('/')[0]}/error/{digest}"
        found = self._store.compare_set(key, "", str(self.rank))
        return int(found)

    def explain_loss(self) -> tuple[str, str]:
        """(which rank ended first and why, or who does not come, and its traceback), as far as this rank hears of it within
        two seconds; else empty. For a process that has lost its peers. One listener only gets the traceback.
        """
        if self._collector is None:
            return "", ""
        self.limit = 0.0  # it does not wait any more: no report, and nothing goes on
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            statuses = [s for s in self._statuses() if s.rank != self.rank]
            first = ended_first(statuses)
            # One that only followed: the end of the rank that it followed may be heard of a moment later.
            if first is not None and not (
                excepthook.only_followed(first.last_words) and time.monotonic() < deadline - 1
            ):
                found = lost_rank(statuses, host_info.memory_report(self._kills)) or ""
                speaks = self.rank == min(set(self._listeners) - {first.rank})
                return found, (first.last_words or "") if speaks else ""
            time.sleep(0.05)
        # Its own location is in the handler of an error by now; what it reported when it waited is in the log.
        return who_is_late(statuses, _SILENT_TICKS * self.tick + 1), ""
