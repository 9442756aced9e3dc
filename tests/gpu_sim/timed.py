"""Steps of 8 layers of Llama-3 8B in the timed model, under this engine and under torch's FSDP2: how much communication shows.

    python -m tests.gpu_sim.timed [--world 8] [--network 300 50] [--engines zero0 zero1 zero2 zero3 fsdp2]
                                  [--wires '{"weights": "int8", "gradients": "int4"}']

One rank is simulated; the others do as it does at the same moment. The host takes no time. See `costs.py` for the hardware.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.gpu_sim import costs
from tests.gpu_sim.rank import GPU, simulated_rank
from tests.gpu_sim.replay import Outcome, replay
from tests.gpu_sim.training import STEADY
from tests.scale.engines import CLIPPING, LLAMA_3, OPTIMIZER, Case, make_fsdp2

CONFIGS = Path(__file__).parents[2] / "configs"
LAYERS = replace(LLAMA_3["8b"], layers=8, checkpointing=False)
SHIPPED = ("zero0", "zero1", "zero2", "zero3")
PEERS = ("fsdp2", "fsdp2 ends")
STEPS = 3


def shipped(name: str, *, wires: dict[str, Any] | None = None, **zero: Any) -> dict[str, Any]:
    """A config of the package as a Trainer with its defaults completes it, but with the loss as HF computes it.

    `wires`: keys of `hf_dist.wires`."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    config |= {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    config |= {
        "gradient_clipping": CLIPPING,
        "hf_dist": {"stall_report_seconds": 0, "check_load": False, "tiled_loss": False},
    }
    if wires:
        config["hf_dist"]["wires"] = wires
    config["zero_optimization"] |= zero
    return config


def run(
    rank: int,
    meet: str,
    engine: str,
    world: int,
    network: float,
    case: Case = LAYERS,
    zero: dict[str, Any] | None = None,
    wires: dict[str, Any] | None = None,
) -> Outcome:
    """The last of some steps. `network`: bytes per second of a rank; `zero`, `wires`: keys of `zero_optimization` and of
    `hf_dist.wires`."""
    with simulated_rank(world, rank) as (recorder, nccl):
        nccl.network = network
        mesh = init_device_mesh("cuda", (world,)) if engine in PEERS else None  # reads tensors, which need elements
        with recorder:
            with torch.device(GPU):
                model = case.llama()
            ids = torch.zeros(case.rows, case.seq, dtype=torch.long, device=GPU)
            step = (
                _ours(model, shipped(engine, wires=wires, **(zero or {})))
                if mesh is None
                else _theirs(model, mesh, engine)
            )
            for number in range(STEPS):
                if number == STEPS - 1:
                    recorder.trace.mark(STEADY)
                step({"input_ids": ids, "labels": ids})
        return replay([recorder.trace], mark=STEADY)


def _ours(model: nn.Module, config: dict[str, Any]) -> Any:
    import hf_dist

    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)
    engine = hf_dist.initialize(model, config=config, optimizer=optimizer, device=GPU)

    def step(batch: dict[str, torch.Tensor]) -> None:
        engine.backward(engine(**batch).loss)
        engine.step()

    return step


def _theirs(model: nn.Module, mesh: Any, engine: str) -> Any:
    return make_fsdp2(model, mesh, ends=engine.endswith("ends"))[1]


def main() -> None:
    """See the module."""
    from tests.gpu_sim.server import simulate

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--network", nargs="+", type=float, default=[costs.NETWORK / 1e9, 50.0], help="GB per second")
    parser.add_argument("--engines", nargs="+", default=[*SHIPPED, *PEERS])
    parser.add_argument("--zero", type=json.loads, default={}, help="keys of zero_optimization, JSON")
    parser.add_argument("--wires", type=json.loads, default={}, help="keys of hf_dist.wires, JSON")
    given = parser.parse_args()
    print("| | GB/s | step ms | compute alone ms | step / compute |\n|---|--:|--:|--:|--:|")
    for engine in given.engines:
        for network in given.network:
            (found,) = simulate(
                "tests.gpu_sim.timed:run", engine, given.world, network * 1e9, LAYERS, given.zero, given.wires
            )
            alone = found.busy["compute"]
            print(
                f"| {engine} | {network:g} | {1e3 * found.seconds:.0f} | {1e3 * alone:.0f} | {found.ratio:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
