"""Steps of layers of Llama-3 8B on several machines in the timed model: what crosses between them, and how much of it shows.

    python -m tests.gpu_sim.timed_copies [--machines 4] [--here 8] [--microbatches 8] [--between 50] [--stages 1 2 3]

ZeRO over all ranks, a second copy of the weights in each machine (hpZ), copies of the shards in each machine (HSDP), and the
optimizer over all of these copies. As in `timed.py` one rank is simulated. Every rank has a link of its own to other machines.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.gpu_sim import costs
from tests.gpu_sim.rank import GPU, simulated_rank
from tests.gpu_sim.replay import Outcome, replay
from tests.gpu_sim.timed import LAYERS, STEPS, shipped
from tests.gpu_sim.trace import COMPUTE
from tests.gpu_sim.training import STEADY
from tests.scale.engines import OPTIMIZER, Case

LAYOUTS = ("all", "hpz", "copies", "over")


@dataclass(frozen=True)
class Links:
    """Bytes per second of a collective: inside of a machine, or between several."""

    here: int
    """Ranks of a machine."""
    inside: float
    between: float

    def __call__(self, kind: str, ranks: tuple[int, ...]) -> float:
        """Each of the ranks that a machine has in the collective carries its share of what crosses, on its own link."""
        machines = len({rank // self.here for rank in ranks})
        if machines == 1:
            return self.inside
        if kind in ("send", "receive", "broadcast"):
            return self.between
        share = ((len(ranks) - 1) / len(ranks)) / (
            (machines - 1) / machines
        )  # of a rank's bytes: the inverse of what crosses
        return min(self.inside, self.between * len(ranks) / machines * share)


def config_of(layout: str, stage: int, here: int, microbatches: int) -> dict[str, Any]:
    """One of `LAYOUTS`."""
    config = shipped(f"zero{stage}")
    config["gradient_accumulation_steps"] = microbatches
    if layout == "hpz":
        config["zero_optimization"]["zero_hpz_partition_size"] = here
    if layout in ("copies", "over"):
        config["zero_optimization"]["mics_shard_size"] = here
    if layout == "over":
        config["hf_dist"]["optimizer_over"] = "all"
    return config


def run(
    rank: int, meet: str, layout: str, stage: int, sizes: tuple[int, int, int], between: float, case: Case = LAYERS
) -> Outcome:
    """The last of some steps. `sizes`: machines, ranks of each, microbatches; `between`: bytes per second between machines."""
    import hf_dist

    machines, here, microbatches = sizes
    with simulated_rank(here * machines, rank) as (recorder, nccl):
        nccl.network = Links(here, costs.NETWORK, between)
        with recorder:
            with torch.device(GPU):
                model = case.llama()
            ids = torch.zeros(case.rows, case.seq, dtype=torch.long, device=GPU)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)
            config = config_of(layout, stage, here, microbatches)
            engine = hf_dist.initialize(model, config=config, optimizer=optimizer, device=GPU)
            for number in range(STEPS):
                if number == STEPS - 1:
                    recorder.trace.mark(STEADY)
                for _ in range(microbatches):
                    engine.backward(engine(input_ids=ids, labels=ids).loss)
                    engine.step()
        return replay([recorder.trace], mark=STEADY)


def main() -> None:
    """See the module."""
    from tests.gpu_sim.server import simulate

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument("--here", type=int, default=8, help="ranks of a machine")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=LAYERS.layers)
    parser.add_argument("--between", type=float, default=50.0, help="GB per second of a rank between machines")
    parser.add_argument("--stages", nargs="+", type=int, default=[3])
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    given = parser.parse_args()
    sizes = (given.machines, given.here, given.microbatches)
    case = replace(LAYERS, layers=given.layers)
    print("| layout | ZeRO | step ms | compute alone ms | step / compute |\n|---|--:|--:|--:|--:|")
    for stage in given.stages:
        for layout in given.layouts:
            if stage < 3 and layout in ("hpz", "copies"):
                continue  # read at stage 3
            job = (layout, stage, sizes, given.between * 1e9, case)
            (found,) = simulate("tests.gpu_sim.timed_copies:run", *job)
            alone = found.busy[COMPUTE]
            print(
                f"| {layout} | {stage} | {1e3 * found.seconds:.0f} | {1e3 * alone:.0f} | {found.ratio:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
