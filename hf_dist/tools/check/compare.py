"""The verdict from the runs: rows with the result of one process, of the layout, and the allowed difference."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hf_dist.dist.spawn import run_ranks
from hf_dist.tools.check.blame import Blamed, to_blame
from hf_dist.tools.check.itself import TOGETHER, TWICE
from hf_dist.tools.check.job import Job
from hf_dist.tools.check.limits import DRAWN, FP32, limits, relative, wider
from hf_dist.tools.check.parts import Part, alone_parts, one_rank, parts_without_one
from hf_dist.tools.check.runs import in_one_process, in_other_draws, on_ranks

__all__ = ["Proof", "Row", "compare", "prove"]


@dataclass(frozen=True)
class Row:
    """One quantity."""

    what: str
    alone: str
    """The result of one process, as a number or a name."""
    layout: str
    difference: float
    """Relative."""
    allowed: float
    first: str = ""
    """The tensor that differs, if any."""

    @property
    def equal(self) -> bool:
        """Whether the difference is within the allowed one. NaN never is."""
        return self.difference <= self.allowed


@dataclass(frozen=True)
class Proof:
    """The verdict."""

    rows: list[Row]
    precision: str
    notes: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    """Tensors that differ, in the model's order, at the first step at which any differs."""
    differs_at: int = 0
    """That step, counted from 1; 0 if no tensor differs."""
    blamed: list[Blamed] = field(default_factory=list)
    """Results of the layout with fewer axes, if the whole layout differs and has several."""

    @property
    def equal(self) -> bool:
        """Whether the layout equals one process in everything that was compared."""
        return all(row.equal for row in self.rows)

    @property
    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        rows = [{**asdict(row), "equal": row.equal} for row in self.rows]
        blamed = [{**asdict(part), "what": part.what} for part in self.blamed]
        return {**asdict(self), "rows": rows, "blamed": blamed, "to_blame": self.to_blame, "equal": self.equal}

    @property
    def to_blame(self) -> str:
        """The axes that are likely to be wrong, with their sizes, or a sentence; empty if no parts of the layout were run."""
        return to_blame(self.blamed)


def prove(job: Job, world: int, timeout: float = 3600) -> Proof:
    """Run everything on this machine and compare. Raises RuntimeError with the traceback of a rank that fails.

    If the layout differs and has several axes, each axis runs alone. If those are all equal, the layout runs without each axis;
    if none is, the engine runs on one rank.
    """
    alone = run_ranks(in_one_process, 1, (job,), timeout)[0]
    ranks = run_ranks(on_ranks, world, (job,), timeout)
    proof = compare(job, alone, ranks)
    if not proof.equal:  # then it is worth to learn how far rounding can go
        proof = compare(job, alone, ranks, run_ranks(in_other_draws, 1, (job,), timeout)[0])
    if (
        proof.equal or job.encoding is not None
    ):  # fewer ranks send other messages, which one process would have to imitate
        return proof

    def tried(part: Part) -> Blamed:
        outcome = functools.partial(Blamed, part.axis, part.named, part.tried, on=part.on)
        if part.job == job:
            return outcome(False, next(iter(proof.differs), ""))
        try:
            found = compare(part.job, alone, run_ranks(on_ranks, part.world, (part.job,), timeout))
        except RuntimeError as error:
            return outcome(False, error=str(error).strip().splitlines()[-1])
        return outcome(found.equal, next(iter(found.differs), ""))

    single = [tried(part) for part in alone_parts(job)]
    if len(single) > 2 and all(each.equal for each in single):
        single += [tried(part) for part in parts_without_one(job)]
    elif single and not any(each.equal for each in single):
        single.append(tried(one_rank(job)))
    return replace(proof, blamed=single)


def compare(
    job: Job, alone: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, object]] = ()
) -> Proof:
    """The verdict. `alone`: the result of `in_one_process`; `ranks`: the results of `on_ranks`, by rank; `others`: those of
    `in_other_draws`, whose distances are allowed, too."""
    fp32 = job.precision == "fp32"
    expected = alone["plain"] if fp32 else alone["same"]
    first = ranks[0]
    cut = job.layout.get("tensor_parallel", {}).get("autotp_size", 1) > 1
    same = None if fp32 else alone["same"]
    routed = alone.get("routed", ()) if job.precision == "fp16" or others else ()
    allowed = limits(alone["plain"], same, job.steps, cut=cut, routed=routed)
    for other in others:
        allowed = wider(allowed, expected, other)
    rows = [
        _numbers("loss", expected["losses"], first["losses"], allowed.losses),
        _numbers("gradient norm", expected["norms"], first["norms"], allowed.norms),
    ]
    order = {name: place for place, name in enumerate(first["reloaded"])}
    by_step = [_joined([r["differences"][step] for r in ranks if r["differences"]]) for step in range(job.steps)]
    differs: list[str] = []
    differs_at = 0
    for step, found in enumerate(by_step):
        if not differs:
            wrong = [name for name, value in found.items() if not value <= allowed.of(name, step)]
            differs = sorted(wrong, key=lambda name: order.get(name, len(order)))  # ranks may hold every other layer
            differs_at = step + 1 if differs else 0
        if step in (0, job.steps - 1):
            rows.append(_tensors(f"weights after step {step + 1}", found, functools.partial(allowed.of, step=step)))
    rows.append(_tensors("saved, read by from_pretrained", first["reloaded"], allowed.of))
    going, resumed = first["next"]["going on"], first["next"]["resumed"]
    rows.append(_numbers("next step, loss", [expected["losses"][-1]], [going[0]], allowed.losses))
    rows.append(_numbers("resumed, loss and norm", going, resumed, FP32))
    if math.isfinite(expected["evaluation"]):  # a row without labels has no loss
        what = f"evaluation of {job.window + 1} rows"
        limit = max(allowed.losses, allowed.evaluation)
        rows.append(_numbers(what, [expected["evaluation"]], [first["evaluation"]], limit))
    by_itself = alone.get("itself", {})
    if first.get("outputs"):
        rows.append(_tensors(f"outputs of {job.window + 1} rows", first["outputs"], allowed.of_output))
    if TWICE in by_itself:
        once, again = by_itself[TWICE]
        rows.append(_numbers(TWICE, [once], [again], FP32))
    notes = [
        f"{job.optimizer}, learning rate {job.optimizer_params.get('lr', 'its own')}; dropout is 0; data of {job.window} "
        "microbatches a step"
    ]
    notes.extend(job.said)
    if others:
        notes.append(
            f"allowed is {DRAWN:.0f} times what one process changes when it rounds otherwise (rows of a step in another order, "
            "products in parts), where that is more"
        )
    if "whole" in alone:
        notes.append(_of_imitated(job, alone["plain"], alone["whole"]))
    if not fp32:
        notes.append(f"one process is {job.precision}, too; allowed is what its distance from fp32 makes likely")
    if TWICE in by_itself:
        notes.append(
            "the model draws random numbers by itself: two forwards of one process differ, and no layout can be proved"
        )
    if TOGETHER in by_itself and not all(row.equal for row in rows):  # sums are added up rightly
        notes.append(
            "the loss depends on which rows are in one batch (in-batch negatives, statistics of the batch, padding in it): any "
            "number of data ranks or microbatches trains another model than one batch"
        )
    if first.get("refused"):
        notes.append(f"predict() does not give every output in this layout: {first['refused']}")
    if first["skipped"]:
        notes.append(f"{first['skipped']} of {job.steps} steps were skipped by the loss scale")
    return Proof(rows, job.precision, notes, differs, differs_at)


def _of_imitated(job: Job, imitated: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    """How far encoded messages and products in float8 take one process."""
    apart = whole["differences"][-1]
    worst = max(apart, key=lambda name: apart[name])
    loss, norm = (relative(whole[key], imitated[key]) for key in ("losses", "norms"))
    what = "one process encodes its messages, too. " if job.encoding is not None else ""
    instead = ["sends numbers as they are"] * (job.encoding is not None) + ["multiplies in fp32"] * job.eights
    return (
        f"{what}Against one that {' and '.join(instead)}: loss {loss:.1e}, gradient norm {norm:.1e}, "
        f"weights after step {len(whole['differences'])} at most {apart[worst]:.1e} ({worst})"
    )


def _joined(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the results of several pipeline stages; a quantity that two stages hold must be right in both."""
    joined: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            joined[name] = value if math.isnan(value) else max(value, joined.get(name, 0.0))
    return joined


def _numbers(what: str, expected: Sequence[float], got: Sequence[float], allowed: float) -> Row:
    worst = max(range(min(len(expected), len(got))), key=lambda i: relative(expected[i : i + 1], got[i : i + 1]))
    if len(expected) > 2:
        what = f"{what}, {min(len(expected), len(got))} steps"
    return Row(what, f"{expected[worst]:.6f}", f"{got[worst]:.6f}", relative(expected, got), allowed)


def _tensors(what: str, found: Mapping[str, float], allowed: Callable[[str], float]) -> Row:
    """`allowed`: for each tensor. The worst is the one that is nearest to it, or farthest beyond."""
    values = {name: math.inf if math.isnan(value) else value for name, value in found.items()}
    worst = max(values, key=lambda name: values[name] / allowed(name))
    first = next((name for name, value in values.items() if value > allowed(name)), "")
    return Row(what, f"{len(found)} tensors", f"worst: {worst}", values[worst], allowed(worst), first)
