"""Figures of `hf_dist/parallel/local_sgd/RESULTS.md` about replicas that meet a server, outside the test run:

python -m tests.parallel.local_sgd.bench_server FOLDER

Three replicas of one rank; a step lasts at least `SECONDS`, so that two cores are no limit. The model, the text and the
synchronous beginning are those of `bench.py`."""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.harness import run_ranks
from tests.parallel.local_sgd.bench import BEGINNING, LR, ROWS, curve, model_and_blocks, write_blocks
from tests.workers.launcher import launch

EVERY, STEPS, SECONDS = 10, 200, 0.3
SECTION = {"every": EVERY, "outer_lr": 1.0, "outer_momentum": 0.5, "nesterov": True}
RUNS: dict[str, tuple[tuple[int, float], ...]] = {
    "alone": ((STEPS, 1),),
    "three alike": ((STEPS, 1),) * 3,
    "one at half speed": ((STEPS, 1), (STEPS, 1), (STEPS // 2, 2)),
    "one at half speed, one killed": ((STEPS, 1), (STEPS // 2, 2), (-STEPS // 2, 1)),
}
"""For each replica: its steps, below 0 if it is killed after them, and how many times as long they last."""
SYNCHRONOUS = {
    "three alike": STEPS,
    "one at half speed": STEPS * 5 // 6,
    "one at half speed, one killed": STEPS * 2 // 3,
}
"""Steps of three synchronous replicas with as many tokens."""


def _rate(step: int, steps: int) -> float:
    """Goes on where the beginning's schedule was."""
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (0.4 + 0.6 * min(1.0, step / steps))))


def _engine(
    folder: str, section: dict[str, Any], steps: int, **sections: Any
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    import hf_dist

    model, train, held_out = model_and_blocks(folder)
    config = {"train_micro_batch_size_per_gpu": ROWS, "gradient_clipping": 1.0, "local_sgd": section, **sections}
    if sections:
        from hf_dist.config import load_config
        from hf_dist.hf.roles import enter

        enter(load_config(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, betas=(0.9, 0.95))
    engine = hf_dist.initialize(model, config=config, optimizer=optimizer, device="cpu")
    engine.load_checkpoint(f"{folder}/beginning")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(_rate, steps=steps))
    engine.after = schedule.step
    return engine, train, held_out


def _steps(engine: Any, train: torch.Tensor, steps: int, share: tuple[int, int], seconds: float) -> list[float]:
    """When each step ended."""
    ends, (number, of) = [], share
    for step in range(steps):
        began = time.monotonic()
        first = ((BEGINNING * 4 // of + step) * of + number) * ROWS % (len(train) - ROWS)
        rows = train[first : first + ROWS]
        engine.backward(engine(input_ids=rows, labels=rows).loss)
        engine.step()
        engine.after()
        time.sleep(max(0.0, seconds - (time.monotonic() - began)))
        ends.append(time.monotonic())
    engine.synchronize_replicas()
    return ends


def _loss(engine: Any, held_out: torch.Tensor) -> float:
    engine.eval()
    with torch.no_grad():
        return float(engine(input_ids=held_out, labels=held_out).loss)


def synchronous(rank: int, world: int, folder: str, steps: int) -> float:
    """The loss after `steps` steps of three replicas that meet each other."""
    engine, train, held_out = _engine(folder, SECTION, steps)
    _steps(engine, train, steps, (rank, world), 0.0)
    return _loss(engine, held_out)


def _served(run: str, folder: str) -> None:
    """Of one process of a start: a replica leaves its loss and the times of its steps."""
    rank, plan = int(os.environ["RANK"]), RUNS[run]
    trainer = {"ranks": "rest", "replicas": len(plan)}
    roles = {"hf_dist": {"roles": {"server": {"ranks": 1, "averages": True}, "trainer": trainer}}}
    steps, slower = plan[rank - 1] if rank else (0, 0)
    base = str(Path(folder).parent)
    engine, train, held_out = _engine(base, {**SECTION, "mode": "server"}, abs(steps), **roles)
    ends = _steps(engine, train, abs(steps), (rank - 1, len(plan)), SECONDS * slower)
    if steps < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.outer.rest()
    found = {"loss": _loss(engine, held_out), "ends": ends, "replica": rank - 1, "version": engine.outer.version}
    Path(folder, f"replica{rank - 1}.json").write_text(json.dumps(found))
    engine.outer.leave()


CASES: dict[str, Callable[[str], None]] = {name: functools.partial(_served, name) for name in RUNS}


def main(folder: Path) -> None:
    """Run all, print one line for each."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "beginning").exists():
        write_blocks(folder)
        run_ranks(curve, 4, ({}, str(folder), True), timeout=1200)
    for name, plan in RUNS.items():
        place = folder / name.replace(" ", "_").replace(",", "")
        place.mkdir(exist_ok=True)
        launch(name, place, 1 + len(plan), 1200, "tests.parallel.local_sgd.bench_server", sends_sigterm=False)
        found = [json.loads(file.read_text()) for file in sorted(place.glob("replica*.json"))]
        last = max(found, key=lambda each: each["version"])
        # Of the first replica: from its first meeting on, without the start.
        ends = found[0]["ends"]
        speed = (len(ends) - EVERY) / (ends[-1] - ends[EVERY - 1])
        line = f"{name}: loss {last['loss']:.4f}, {last['version']} pushes; replica 0 makes {speed:.3f} steps a second"
        if name in SYNCHRONOUS:
            loss = run_ranks(synchronous, 3, (str(folder), SYNCHRONOUS[name]), timeout=1200)[0]
            line += (
                f"; synchronous after {SYNCHRONOUS[name]} steps: {loss:.4f} ({100 * (last['loss'] / loss - 1):+.1f}%)"
            )
        print(line, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
