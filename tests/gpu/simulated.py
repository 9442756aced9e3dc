"""The simulated GPU beside the real one: a step of four layers of Llama-3 8B in one process, its kernels and waits counted.

    python -m tests.gpu.simulated --keep   with a CPU build of torch, which the simulator needs: writes simulated.json
    python -m tests.gpu.simulated          on a GPU: the same steps there, beside the file

Per setting: kernels that a step launches, waits of the host, and the step's time relative to stage 0. The simulator's host
takes no time and its hardware is a data sheet, so only ratios are to be compared.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests import processes
from tests.gpu.place import DEVICE, GPUS
from tests.gpu.results import record, table

SETTINGS: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero3": {"stage": 3},
    "zero2, optimizer on the host": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
}
WARM_UP, STEPS = 3, 5
KEPT = Path(__file__).with_name("simulated.json")


def config_of(zero: dict[str, Any]) -> dict[str, Any]:
    """With the loss as HF computes it."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "hf_dist": {"stall_report_seconds": 0, "check_load": False, "tiled_loss": False},
    }


def case() -> Any:
    """Layers that fit any card."""
    from tests.scale.engines import LLAMA_3

    return replace(LLAMA_3["8b"], layers=4, checkpointing=False)


def run_simulated(rank: int, meet: str, zero: dict[str, Any]) -> dict[str, float]:
    """The last of some steps of one simulated rank."""
    import hf_dist
    from tests.gpu_sim.rank import GPU, simulated_rank
    from tests.gpu_sim.replay import replay
    from tests.gpu_sim.trace import Launched
    from tests.gpu_sim.training import STEADY

    work = case()
    with simulated_rank(1, rank) as (recorder, _), recorder:
        with torch.device(GPU):
            model = work.llama()
        engine = hf_dist.initialize(model, config=config_of(zero), device=GPU)
        ids = torch.zeros(work.rows, work.seq, dtype=torch.long, device=GPU)
        for number in range(WARM_UP):
            if number == WARM_UP - 1:
                recorder.trace.mark(STEADY)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
    steady = recorder.trace.entries[recorder.trace.marks[STEADY] :]
    kernels = sum(isinstance(entry, Launched) for entry in steady)
    seconds = replay([recorder.trace], mark=STEADY).seconds
    return {"kernels": kernels, "waits": len(recorder.trace.waits(STEADY)), "seconds": seconds}


def run_real(zero: dict[str, Any]) -> dict[str, float]:
    """Some steps on the device: median time, kernels by torch's profiler, waits by CUDA's own warnings."""
    import hf_dist

    work = case()
    torch.manual_seed(0)
    engine = hf_dist.initialize(work.llama().to(DEVICE), config=config_of(zero), device=DEVICE)
    ids = torch.zeros(work.rows, work.seq, dtype=torch.long, device=DEVICE)

    def step() -> float:
        begun = time.perf_counter()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    times = sorted([step() for _ in range(WARM_UP + STEPS)][WARM_UP:])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchroniz" in str(each.message) for each in said)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
    kernels = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())
    return {"kernels": kernels, "waits": waits, "seconds": times[len(times) // 2]}


def simulated() -> dict[str, dict[str, float]]:
    """Every setting, simulated."""
    from tests.gpu_sim.server import simulate

    return {name: simulate("tests.gpu.simulated:run_simulated", zero)[0] for name, zero in SETTINGS.items()}


def main() -> int:
    """Print and keep the table. A real run has a process of its own: the second finds the memory of the first free."""
    if sys.argv[1:] == ["--keep"]:
        KEPT.write_text(json.dumps(simulated(), indent=1) + "\n", encoding="utf-8")
        return 0
    if len(sys.argv) > 1:
        print(json.dumps(run_real(json.loads(sys.argv[1]))))
        return 0
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    rows: list[dict[str, str]] = []
    first: dict[str, float] = {}
    for name, zero in SETTINGS.items():
        found = {"simulated": kept[name]}
        if GPUS:
            done = processes.run([sys.executable, "-m", "tests.gpu.simulated", json.dumps(zero)], timeout=200)
            if done.returncode:
                print(done.stderr[-2000:])
                return 1
            found["real"] = json.loads(done.stdout.splitlines()[-1])
        row = {"setting": name}
        for kind, each in found.items():
            base = first.setdefault(kind, each["seconds"])
            row |= {f"{kind} kernels": f"{each['kernels']:.0f}", f"{kind} waits": f"{each['waits']:.0f}"}
            row |= {f"{kind} step / zero0": f"{each['seconds'] / base:.2f}"}
        rows.append(row)
        record("simulated", row)
    print("\n".join(table(tuple(rows[0]), [tuple(row.values()) for row in rows])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
