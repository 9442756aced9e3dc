"""Rounds of all contenders in turn (A B C A B C), so that a machine that slows down affects all equally."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_dist.tools.bench.prepare import Prepared
from hf_dist.tools.bench.processes import RunFailedError, run
from hf_dist.tools.bench.work import Contender, Work

__all__ = ["InterruptedRounds", "Row", "Run", "run_rounds", "summarize"]

ALLOWED = {"fp32": 1e-4, "bf16": 2e-3}
"""Relative difference of losses up to which two engines did the same; bf16 engines round at different places."""


@dataclass
class Run:
    """One contender in one round."""

    contender: int
    number: int
    load: float
    """Processes that wanted a core at the start (one-minute average)."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """Measurements of each rank; empty if the run failed."""
    error: str = ""

    @property
    def step_seconds(self) -> list[float]:
        """Of the slowest rank, step by step."""
        return [max(step) for step in zip(*(rank["step_seconds"] for rank in self.ranks), strict=True)]


@dataclass
class Row:
    """One contender over all rounds."""

    name: str
    engine: str
    error: str = ""
    speed: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Lower quartile, median and upper quartile of tokens (or samples) per second over the timed steps, all ranks together."""
    ratio: float | None = None
    """Ratio of this median to the first row's."""
    step_seconds: float = 0.0
    """Median; the slowest rank determines a step."""
    peak_nbytes: int = 0
    """Highest peak of a rank during the timed steps, above the process's memory before the model was created."""
    sent_nbytes: int | None = None
    """Bytes per step of the rank that sends most; None if not counted."""
    phases: dict[str, float] = field(default_factory=dict)
    """Parts of the median step in seconds, including waits; the median over ranks and rounds."""
    waiting_seconds: float | None = None
    """Part of the step in which a rank only waited; None if not measured."""
    first_step_seconds: float = 0.0
    """From the start of the process to the end of the first step."""
    import_seconds: float = 0.0
    """Of these, the time until all libraries were imported."""
    losses: list[float] = field(default_factory=list)
    """Losses of every step, averaged over ranks."""
    difference: float | None = None
    """Largest relative difference of a loss from the first row's."""
    agrees: bool = True
    """Whether the precision explains that difference."""


class InterruptedRounds(KeyboardInterrupt):
    """Ctrl-C during the rounds, with the runs that were complete by then."""

    def __init__(self, runs: list[Run]) -> None:
        super().__init__()
        self.runs = runs


def run_rounds(prepared: Prepared, rounds: int, tell: Callable[[str], None]) -> list[Run]:
    """Run every contender once per round. One that fails is left out of later rounds. Raises `InterruptedRounds`."""
    runs: list[Run] = []
    failed: set[int] = set()
    for number in range(rounds):
        for index, contender in enumerate(prepared.contenders):
            if index in failed:
                continue
            tell(f"round {number + 1} of {rounds}: {contender.name}")
            load, start = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, time.monotonic()
            try:
                runs.append(Run(index, number, load, run(prepared.work, contender)))
            except RunFailedError as error:
                failed.add(index)
                runs.append(Run(index, number, load, error=str(error).strip()))
                tell("  failed: " + runs[-1].error.rpartition("\n")[2])
            except KeyboardInterrupt:
                raise InterruptedRounds(runs) from None
            else:
                speed = prepared.work.tokens_per_step / statistics.median(runs[-1].step_seconds)
                tell(f"  {speed:.0f} {prepared.work.unit}/s, in {time.monotonic() - start:.0f} s with its start")
    return runs


def summarize(work: Work, contenders: Sequence[Contender], runs: Sequence[Run]) -> list[Row]:
    """One row per contender, in order."""
    rows = []
    for index, contender in enumerate(contenders):
        own = [each for each in runs if each.contender == index]
        errors = [each.error for each in own if each.error]
        rows.append(Row(contender.name, contender.engine, error=errors[0]) if errors else _row(work, contender, own))
    first = next((row for row in rows if not row.error), None)
    for row in rows:
        if first is not None and not row.error:
            row.ratio = row.speed[1] / first.speed[1]
            row.difference = max(
                abs(ours - theirs) / max(abs(theirs), 1e-12)
                for ours, theirs in zip(row.losses, first.losses, strict=True)
            )
            row.agrees = row.difference <= ALLOWED[work.dtype]
    return rows


def _row(work: Work, contender: Contender, runs: Sequence[Run]) -> Row:
    every = [rank for each in runs for rank in each.ranks]
    steps = [seconds for each in runs for seconds in each.step_seconds]
    low, middle, high = _quartiles([work.tokens_per_step / seconds for seconds in steps])
    typical = statistics.median(steps)
    first = runs[0].ranks
    shares = [_shares(rank) for rank in every]
    sent = [rank["sent_nbytes"] for rank in first]
    waits = [share["waiting"] for share in shares if "waiting" in share]
    rest: dict[str, Any] = {
        "waiting_seconds": typical * statistics.median(waits) if waits else None,
        "first_step_seconds": _median_of_slowest(runs, "first_step_seconds"),
        "import_seconds": _median_of_slowest(runs, "import_seconds"),
        "losses": [statistics.fmean(step) for step in zip(*(rank["losses"] for rank in first), strict=True)],
    }
    return Row(
        contender.name,
        contender.engine,
        speed=(low, middle, high),
        step_seconds=typical,
        peak_nbytes=max(rank["peak_nbytes"] for rank in every),
        sent_nbytes=None if None in sent else max(sent),
        phases={name: typical * statistics.median(share[name] for share in shares) for name in first[0]["phases"]},
        **rest,
    )


def _shares(rank: dict[str, Any]) -> dict[str, float]:
    """Parts of the mean step: the phases, and `waiting` if it was measured."""
    mean = statistics.fmean(rank["step_seconds"])
    parts = dict(rank["phases"])
    if rank["waiting_seconds"] is not None:
        parts["waiting"] = rank["waiting_seconds"]
    return {name: seconds / mean for name, seconds in parts.items()}


def _median_of_slowest(runs: Sequence[Run], key: str) -> float:
    return statistics.median(max(rank[key] for rank in each.ranks) for each in runs)


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
