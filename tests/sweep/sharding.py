"""Which HF classes train at ZeRO-3 as under DDP: every class of five mappings that a tiny config can build, on two ranks.

    python -m tests.sweep sharding [--only PATTERN] [--seconds N] [--results FILE] [--write]

Two steps each, under DDP and through `hf_dist`: losses, gradient norms and every weight afterwards within 1e-5, relative.
One pair of processes serves many classes; it is replaced when one of them dies, hangs, or has raised in the middle of a step.
`--results` keeps the rows between calls (those already there are not run again), `--write` replaces SHARDING.md.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import multiprocessing as mp
import os
import random
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_dist.dist.ports import HeldPort
from tests.sharding.loop import TOLERANCE, adamw, difference
from tests.sweep.pipeline import classes, sections, short
from tests.sweep.tiny import builders, tiny_batches

WORLD, STEPS = 2, 2
TABLE = Path(__file__).parent / "SHARDING.md"
SECONDS = 90
"""Longest wait for an answer about one class."""
JOBS_PER_POOL = 40
Outcome = tuple[str, str]
Record = dict[str, Any]
Examine = Callable[[str, str, int, Any, Any], tuple[Outcome, bool]]
"""(task, class, data rank, mesh, config) -> the outcome, whether the ranks are fit for the next class. All ranks call it."""
InDouble = Callable[[Callable[[], nn.Module], list[Any], Any], Outcome]
"""(how the model is made, batches, mesh) -> the outcome in fp64; every rank calls it."""


# ---- in the ranks


def fresh(build: Callable[[], nn.Module]) -> Any:
    """The model, made alike on every rank."""
    seed(0)
    return build()


def seed(number: int) -> None:
    """Every source of random numbers that a forward can draw from."""
    import numpy as np

    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def batch_of(batches: list[Any], rank: int, step: int) -> Any:
    """Other rows and another length on each rank; they change places."""
    return batches[(rank + step) % len(batches)]


def loss_of(model: Any, batches: list[Any], rank: int, step: int) -> torch.Tensor:
    """Of this rank's rows, with the same random numbers on every run."""
    seed(100 + 10 * step + rank)
    return model(**batch_of(batches, rank, step)).loss


def runs_alone(task: str, build: Callable[[], nn.Module]) -> list[Any]:
    """The batches, if forward and backward of all of them work in one process; raises otherwise."""
    model = fresh(build)
    batches = tiny_batches(task, model)
    losses = [loss_of(model, batches, rank, 0) for rank in range(len(batches))]
    for loss in losses:
        loss.backward()
    again = [loss_of(model, batches, rank, 0).item() for rank in range(len(batches))]
    values = [loss.item() for loss in losses]
    if not all(map(_is_finite, values)):
        raise ValueError(f"its loss is {values}")
    if values != again:
        raise ValueError("its loss differs from call to call")
    return batches


def _is_finite(value: float) -> bool:
    return abs(value) < float("inf")


def under_ddp(model: Any, batches: list[Any], rank: int) -> Record:
    """The reference."""
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = adamw(model)
    record: Record = {"losses": [], "norms": []}
    for step in range(STEPS):
        loss = loss_of(wrapped, batches, rank, step)
        loss.backward()
        record["losses"].append(loss.item())
        # In double: torch's sum of squares over a large fp32 tensor is off by up to 7e-5 on a CPU.
        grads = [p.grad.double() for p in model.parameters() if p.grad is not None]
        record["norms"].append(float(nn.utils.get_total_norm(grads)))
        optimizer.step()
        optimizer.zero_grad()
    return record | {"weights": {n: p.detach().clone() for n, p in model.named_parameters()}}


def sharded(model: Any, batches: list[Any], rank: int, mesh: Any, config: Any) -> Record:
    """The same at stage 3."""
    import hf_dist
    from hf_dist.config import solve_batch
    from hf_dist.engine.build import build_engine

    engine = build_engine(model, config, mesh, solve_batch(None, 2, 1, mesh.data.size), optimizer=adamw(model))
    record: Record = {"losses": [], "norms": []}
    for step in range(STEPS):
        loss = loss_of(model, batches, rank, step)
        engine.backward(loss)
        engine.step()
        record["losses"].append(loss.item())
        record["norms"].append(engine.get_global_grad_norm())
    with hf_dist.gathered(model):
        return record | {"weights": {n: p.detach().clone() for n, p in model.named_parameters()}}


def compare(got: Record, expected: Record, tolerance: float = TOLERANCE) -> Outcome:
    """`equal` with the worst relative difference, or `WRONG` with where it is."""
    if got["weights"].keys() != expected["weights"].keys():
        return "WRONG", "names of parameters changed"
    offs = {f"{key[:-1]} {i}": abs(a - b) / max(abs(b), 1e-6) for key in ("losses", "norms")
            for i, (a, b) in enumerate(zip(got[key], expected[key], strict=True))}  # fmt: skip
    offs |= {name: difference(got["weights"][name], w) for name, w in expected["weights"].items() if w.numel()}
    where = max(offs, key=lambda name: offs[name] if offs[name] == offs[name] else float("inf"))
    if not offs[where] <= tolerance:
        return (
            "WRONG",
            f"{where} off by {offs[where]:.1e}, relative; {sum(not v <= tolerance for v in offs.values())} values",
        )
    return "equal", f"{offs[where]:.0e}"


def examine(
    task: str, name: str, rank: int, mesh: Any, config: Any, in_double: InDouble | None = None
) -> tuple[Outcome, bool]:
    """Outcome of one class on this (data) rank, and whether the pool is still fit for the next.

    `in_double`: the comparison once more in fp64, for what is wrong in fp32: rounding is gone there, and nothing else is.
    """
    import transformers

    from hf_dist.errors import HfDistError

    problem = ""
    try:
        candidates = list(builders(getattr(transformers, name)))
    except Exception as error:  # its default config is not valid
        return ("not built", short(error)), True
    for build in candidates:
        try:
            batches = runs_alone(task, build)
            break
        except Exception as error:
            problem = problem or short(error)
    else:
        return ("not built", problem), True
    try:
        expected = under_ddp(fresh(build), batches, rank)
    except Exception as error:
        return ("not trained by DDP", short(error)), False
    try:
        found = compare(sharded(fresh(build), batches, rank, mesh, config), expected)
        if found[0] == "WRONG" and in_double is not None:
            outcome, worst = in_double(build, batches, mesh)
            found = "rounding" if outcome == "equal" else "WRONG", f"{found[1]}; in fp64 {worst}"
        return found, True
    except HfDistError as error:
        return ("refused", short(error)), False
    except Exception as error:
        if os.environ.get("HF_DIST_SWEEP_TRACEBACK"):
            traceback.print_exc()
        return ("failed", short(error)), False


def serve(rank: int, port: int, pipe: Connection, layout: dict[str, Any], examine: Examine) -> None:
    """Answer (task, name) until the pipe closes. `layout`: more keys of the JSON."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        ACCELERATE_USE_CPU="true", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    torch.set_num_threads(1)
    from hf_dist.config import load_config, resolve_without_trainer
    from hf_dist.engine.build import mesh_for

    read = load_config({
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "zero_optimization": {"stage": 3},
        "hf_dist": {"stall_report_seconds": 0}, **layout,
    })  # fmt: skip
    mesh = mesh_for(read, device="cpu", timeout=timedelta(seconds=SECONDS))
    config = resolve_without_trainer(read, data_ranks=mesh.data.size, hidden_size=32)
    while True:
        try:
            task, name = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(examine(task, name, mesh.data.rank, mesh, config))
        gc.collect()


# ---- in the process that asks


class Pool:
    """Two ranks that examine one class after the other."""

    def __init__(self, layout: dict[str, Any], examine: Examine) -> None:
        context = mp.get_context("fork")
        self.port = HeldPort()
        self.left = JOBS_PER_POOL
        self.pipes: list[Any] = []
        self.children: list[Any] = []
        for rank in range(WORLD):
            here, there = context.Pipe()
            child = context.Process(target=serve, args=(rank, self.port.number, there, layout, examine), daemon=True)
            child.start()
            there.close()
            self.pipes.append(here)
            self.children.append(child)

    def examine(self, task: str, name: str) -> Outcome:
        """Of both ranks: the one that is worse. A pool that cannot go on has `left` 0."""
        self.left -= 1
        for pipe in self.pipes:
            pipe.send((task, name))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + SECONDS
        while len(answers) < WORLD and time.monotonic() < deadline:
            waiting = [p for rank, p in enumerate(self.pipes) if rank not in answers]
            for pipe in wait(waiting, timeout=max(0.0, deadline - time.monotonic())):
                rank = self.pipes.index(pipe)
                try:
                    answers[rank] = self.pipes[rank].recv()
                except EOFError:
                    answers[rank] = (("failed", "the process ended"), False)
                if not answers[rank][1]:
                    deadline = min(deadline, time.monotonic() + 5)  # the other rank may wait for it
        if len(answers) < WORLD:
            self.left = 0
        if not answers:
            return "failed", f"no answer within {SECONDS} s"
        self.left *= all(fit for _, fit in answers.values())
        return max((outcome for outcome, _ in answers.values()), key=lambda o: ORDER.index(o[0]))

    def close(self) -> None:
        """End both."""
        for pipe, child in zip(self.pipes, self.children, strict=True):
            pipe.close()
            child.kill()
            child.join()
        self.port.release()


ORDER = ("equal", "rounding", "not built", "not trained by DDP", "refused", "failed", "WRONG")


def sweep(
    pattern: str,
    seconds: float,
    rows: dict[str, list[str]],
    save: Callable[[], None],
    layout: dict[str, Any],
    tasks: tuple[str, ...] = (),
    in_double: InDouble | None = None,
) -> None:
    """Add the rows that are missing, until the time is over. `tasks`: mappings to take, all if empty."""
    start = time.monotonic()
    pool: Pool | None = None
    work = functools.partial(examine, in_double=in_double)
    for task, name in classes():
        if not re.search(pattern, name) or name in rows or (tasks and task not in tasks):
            continue
        if time.monotonic() - start > seconds:
            print("time is over: call again with the same --results")
            break
        pool = pool or Pool(layout, work)
        begun = time.monotonic()
        rows[name] = [task, *pool.examine(task, name)]
        save()
        print(f"{rows[name][1]:18} {task:15} {name:45} {time.monotonic() - begun:5.1f} s  {rows[name][2]}", flush=True)
        if not pool.left:
            pool.close()
            pool = None
    if pool:
        pool.close()


def table(rows: list[tuple[str, str, str, str]], title: str, command: str, setting: str) -> str:
    """The Markdown page; `setting`: what was compared, in a sentence or two."""
    import transformers

    counts = Counter(outcome for _, _, outcome, _ in rows)
    built = len(rows) - counts["not built"] - counts["not trained by DDP"]
    share = counts["equal"] / max(built, 1)
    rounding = f"{counts['rounding']} equal in fp64 but not in fp32, " if counts["rounding"] else ""
    lines = [
        f"# {title}",
        "",
        f"`{command}`, torch {torch.__version__}, transformers {transformers.__version__}, CPU, fp32, {setting}",
        "",
        f"{len(rows)} classes, {built} trained tiny by DDP: **{counts['equal']} equal ({share:.1%})**, "
        f"{rounding}{counts['refused']} refused, {counts['failed']} failed, **{counts['WRONG']} wrong**.",
        "",
    ]
    return "\n".join(
        [
            *lines,
            *sections(rows, ("WRONG", "failed", "rounding", "refused", "not trained by DDP", "equal", "not built")),
        ]
    )


SETTING = (
    "two ranks with rows of different lengths. Equal: losses, gradient norms and every weight after two steps of AdamW at "
    "stage 3 within 1e-5 of DDP's with `find_unused_parameters`, relative (the number is the worst). DDP's norm is summed in "
    "double."
)


def main(arguments: list[str]) -> None:
    """Run the sweep and print the table."""
    run(arguments, "sharding", TABLE, SETTING, {})


def run(
    arguments: list[str],
    name: str,
    page: Path,
    setting: str,
    layout: dict[str, Any],
    tasks: tuple[str, ...] = (),
    in_double: InDouble | None = None,
) -> None:
    """The sweep of one layout, with its arguments of the command line."""
    command = f"python -m tests.sweep {name}"
    parser = argparse.ArgumentParser(prog=command, description=f"Which HF classes train alike: {setting}")
    parser.add_argument("--only", default="", help="regular expression on the class name")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no class after this many")
    parser.add_argument("--results", type=Path, help="JSON file with rows of earlier calls, which is added to")
    parser.add_argument("--write", action="store_true", help=f"replace {page.name}")
    options = parser.parse_args(arguments)
    import transformers

    transformers.logging.set_verbosity_error()
    for known in (
        "LlamaForCausalLM",
        "MixtralForCausalLM",
        "BertForMaskedLM",
        "BartForConditionalGeneration",
        "ViTModel",
    ):
        getattr(transformers, known)  # a fork has imported what most models import
    rows: dict[str, list[str]] = {}
    if options.results and options.results.exists():
        rows = json.loads(options.results.read_text(encoding="utf-8"))

    def save() -> None:
        if options.results:
            options.results.write_text(json.dumps(rows, indent=0), encoding="utf-8")

    sweep(options.only, options.seconds, rows, save, layout, tasks, in_double)
    done = [(rows[known][0], known, rows[known][1], rows[known][2]) for _, known in classes() if known in rows]
    text = table(done, f"{name.capitalize()} sweep", f"{command} --write", setting)
    print(text.splitlines()[4])
    if options.write:
        page.write_text(text, encoding="utf-8")
