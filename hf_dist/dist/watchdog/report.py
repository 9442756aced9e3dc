"""Determines which rank is late from the statuses of all ranks. Pure: statuses in, text out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hf_dist.dist.collective_guard import REMEDY
from hf_dist.dist.excepthook import named, only_followed
from hf_dist.dist.watchdog.location import MAY_TAKE_LONG, WAITS_FOR_CALLS, Location
from hf_dist.format_bytes import size_text

__all__ = ["Status", "called_alone", "describe_stall", "ended_first", "late_words", "lost_rank", "numbers", "unheeded"]


@dataclass(frozen=True)
class Status:
    """The state of one rank at one moment. Times are ages in seconds, because clocks differ between machines."""

    rank: int
    host: str = ""
    pid: int = 0
    step: int = -1
    """Optimizer steps done; -1 before an engine exists."""
    still: float = 0.0
    """Seconds for which its location has not changed and no collective has started."""
    location: Location = field(default_factory=Location)
    rss: int = 0
    """Resident host memory of the process in bytes."""
    totals: list[dict[str, Any]] = field(default_factory=list)
    """What `own_time.OwnTime` keeps."""
    stage: int = 0
    """Pipeline stage: only ranks of one stage do the same work."""
    told: float = -1.0
    """Seconds since the process received SIGTERM; negative if it has not."""
    silent: float = 0.0
    """Seconds since the rank sent this status."""
    ended: bool = False
    """Whether its connection has closed since."""
    last_words: str | None = None
    """The rank's own message on why it ended: "" without an error, None if it sent none."""
    state: str = ""
    """The kernel's state letter of the process, such as T for stopped; empty if it is on another machine."""

    @property
    def stands(self) -> bool:
        """Whether the process is known not to run: stopped, held by a debugger, or ended."""
        return self.state in ("T", "t", "Z")

    @property
    def waits(self) -> bool:
        """Whether the rank waits for other ranks."""
        return bool(self.location.waits_for)

    @property
    def as_dict(self) -> dict[str, object]:
        """A dict for JSON, without the fields that the receiver fills in."""
        return {k: v for k, v in asdict(self).items() if k not in ("rank", "silent", "ended", "last_words", "state")}

    @property
    def who(self) -> str:
        """The rank's name in messages."""
        return f"{named(self.rank)} (pid {self.pid} on {self.host})" if self.pid else named(self.rank)


def describe_stall(statuses: Sequence[Status], *, limit: float, silence: float, world: int) -> str | None:
    """The report, or None if no rank has waited for `limit` seconds.

    `silence`: seconds without a status after which a rank counts as not answering; `world`: number of ranks of the job.
    """
    answers = [s for s in statuses if not s.ended and s.silent < silence]
    waiting = [s for s in answers if s.waits and s.still >= limit]
    if not waiting or any(WAITS_FOR_CALLS in s.location.activity for s in answers):
        return None  # a role waits for its trainer as long as that takes
    missing = [Status(rank) for rank in sorted(set(range(world)) - {s.rank for s in statuses})]
    absent = [s for s in statuses if s not in answers] + missing
    late = absent + [s for s in answers if not s.waits]
    step = max(s.step for s in waiting)
    longest = max(s.still for s in waiting)
    head = f"hf_dist watchdog: no progress for {longest:.0f} s" + (f" at step {step + 1}" if step >= 0 else "")
    others = [s for s in answers if s.waits]
    if late:
        lines = [line for s in late[:4] for line in _late(s, s in absent)]
        lines += [f"and {len(late) - 4} more ranks"] if len(late) > 4 else []
    else:
        # All ranks wait, so they took different paths. The smallest group probably took the wrong one.
        few = min(_grouped(others).values(), key=len)
        lines = ["every rank waits, but not all for the same thing: they took different paths, or a message was lost"]
        lines += _stack(few[0])
    lines += [f"{numbers(s.rank for s in group)}: {words}" for words, group in _grouped(others).items()]
    if late and not absent:
        lines.append(f"Nothing is known to be wrong with the network: the others wait for {_ranks(late)}.")
    lines.append("This report does not end the job; a process group's timeout (ddp_timeout) does.")
    return "\n  ".join([head, *lines])


def called_alone(statuses: Sequence[Status], *, patience: float, world: int) -> tuple[list[int], str] | None:
    """(ranks that alone made a call which all ranks must make, message); None while the others may still make it.

    The others will not make it if each has ended without an error or has waited for something else for `patience` seconds.
    """
    callers = [s for s in statuses if s.location.called and not s.ended]
    others = [s for s in statuses if s not in callers]
    if not callers or not others or len(statuses) < world:
        return None
    waiting = [s for s in others if not s.ended]
    forward = any(s.location.called.startswith("the forward") for s in callers)
    if any(s.ended and s.last_words != "" for s in others) or any(s.still < patience for s in [*callers, *waiting]):
        return None
    if any(not s.waits or (forward and "forward" in s.location.activity) for s in waiting):
        return None
    where = "; ".join(
        f"{s.who} {'has ended' if s.ended else f'waits for {s.location.waits_for} in: {s.location}'}"
        for s in others[:3]
    )
    ranks = [s.rank for s in callers]
    return ranks, f"{callers[0].location.called} was called by {numbers(ranks)} alone; {where}. {REMEDY}."


def unheeded(statuses: Sequence[Status], patience: float, limit: float) -> str | None:
    """Why a job that was told to end must do so without a save: nothing has moved for `patience` seconds; None if it need not.

    A rank that does what may take minutes gets `limit` seconds at one line, one that saves as long as it takes. Everything is
    waited for while a rank moves.
    """
    here = [s for s in statuses if not s.ended]
    told = max((s.told for s in here), default=-1.0)
    if told < patience or any(s.still + s.silent < _patience_with(s, patience, limit) for s in here):
        return None
    late = [s for s in here if not s.waits] or here[:1]
    return f"SIGTERM came {told:.0f} s ago, and nothing has moved since: {'; '.join(late_words(s, False) for s in late[:3])}"


def _patience_with(status: Status, patience: float, limit: float) -> float:
    if status.waits or not _takes_long(status):
        return patience
    return math.inf if "saving" in _takes_long(status) else max(patience, limit)


def _takes_long(status: Status) -> list[str]:
    return sorted(set(status.location.activity.split(" > ")) & MAY_TAKE_LONG)


def _ranks(statuses: Sequence[Status]) -> str:
    return numbers(s.rank for s in statuses)


def late_words(status: Status, absent: bool | None = None) -> str:
    """One line about a rank that the others wait for. `absent`: whether it does not answer (None: decide here)."""
    before = (
        f"; {status.silent:.0f} s ago it was in: {status.location}" if status.pid else "; it has never been heard of"
    )
    if status.ended:
        return f"{status.who} has ended: {_why_ended(status)}{before}"
    if absent or (absent is None and (status.stands or (status.silent > 1 and not status.waits))):
        return f"{status.who} does not answer: {_why_silent(status)}{before}"
    often = _takes_long(status)
    rightly = f" ({often[0]} may legitimately take this long)" if often else ""
    still = f", at the same line for {status.still:.0f} s" if status.still >= 1 else ", and moves"
    return f"{status.who} is late, in: {status.location}{still}{rightly}"


def who_is_late(statuses: Sequence[Status], silence: float) -> str:
    """The ranks that do not come, and why; empty if all wait, as far as is known. `silence`: as in `describe_stall`.

    A process that is stopped does not come, whatever it said last: on a busy machine it may have spoken a moment ago.
    """
    return "; ".join(late_words(s) for s in statuses if s.silent > silence or not s.waits or s.stands)


def _late(status: Status, absent: bool) -> list[str]:
    return [late_words(status, absent), *([] if status.ended else _stack(status))]


def _why_silent(status: Status) -> str:
    if status.state == "T":
        return f"it is stopped (SIGSTOP, Ctrl-Z); `kill -CONT {status.pid}` lets it go on"
    if status.state == "t":
        return "a debugger holds it"
    if status.state == "Z":
        return "it has ended, and its parent has not noticed"
    if status.state in ("R", "S"):
        return "native code holds the Python interpreter, or the machine is overloaded"
    if status.state == "D":
        return "it waits for a disk or a network file system"
    return "it is stopped, swapping, or its machine cannot be reached"


def _why_ended(status: Status) -> str:
    if status.last_words:
        return status.last_words.rstrip().splitlines()[-1].split(f"rank {status.rank}] ", 1)[-1]
    if status.last_words == "":
        return "it left without an error"
    return "it said nothing, so it was killed (SIGKILL, a scheduler, no host memory left) or crashed in native code"


def ended_first(statuses: Sequence[Status]) -> Status | None:
    """The rank whose end the others followed; None if none has ended.

    One that only lost its peers is named if there is no other: it may have been silent for longer than the one that it lost.
    """
    ended = [s for s in statuses if s.ended]
    causes = [s for s in ended if not only_followed(s.last_words)]
    return max(causes or ended, key=lambda s: s.silent, default=None)


def lost_rank(statuses: Sequence[Status], memory: str) -> str | None:
    """A sentence on the rank that ended first, and why; None if none has. `memory`: the kernel's report of memory kills."""
    first = ended_first(statuses)
    if first is None:
        return None
    held = f", held {size_text(first.rss)} of host memory" if first.rss else ""
    cause = f"; {memory}" if memory and first.last_words is None else ""
    return f"{first.who} ended: {_why_ended(first)}. Before that it was in: {first.location}{held}{cause}"


def _stack(status: Status) -> list[str]:
    if not status.location.stack:
        return []
    name = "Python stack" if not status.silent or status.silent < 1 else f"Python stack {status.silent:.0f} s ago"
    return [f"{name} of {named(status.rank)}, innermost last:", *(f"  {line}" for line in status.location.stack)]


def _grouped(statuses: Sequence[Status]) -> dict[str, list[Status]]:
    groups: dict[str, list[Status]] = {}
    for status in statuses:
        words = f"waits for {status.location.waits_for} in: {status.location}"
        groups.setdefault(words, []).append(status)
    return groups


def numbers(ranks: Iterable[int]) -> str:
    """Text such as `rank 3` or `ranks 0-2, 5`, with their role where the start has several."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return named(text, "rank" if len(runs) == 1 and runs[0][0] == runs[0][1] else "ranks")
