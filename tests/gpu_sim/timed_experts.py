"""Layers of a mixture in the timed model, its experts gathered or visited by tokens: how much communication shows.

    python -m tests.gpu_sim.timed_experts [--layers 4] [--tokens 4096] [--models qwen3-30b gpt-oss-120b]

One rank is simulated, as in `timed.py`; routing is even, so each gets what `planning/expert_traffic.py` expects. Machines of 8:
300 GB/s between their ranks, 50 GB/s per network card. A collective that goes round uses all cards of a machine, tokens that
leave one only that of their rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.gpu_sim import costs
from tests.gpu_sim.rank import GPU, simulated_rank
from tests.gpu_sim.recorder import answered
from tests.gpu_sim.replay import Outcome, replay
from tests.gpu_sim.timed import STEPS, _ours, shipped
from tests.gpu_sim.trace import Launched
from tests.gpu_sim.training import STEADY

MACHINE, CARD = 8, 50e9
"""Ranks; bytes per second of the card of each."""


@dataclass(frozen=True)
class Mixture:
    """A model of which a few layers are run."""

    width: int
    inner: int
    experts: int
    chosen: int
    heads: int
    key_heads: int
    layers: int
    """Of the whole model."""

    def build(self, layers: int) -> Any:
        """A stock HF model in fp32, in train mode."""
        import transformers as tf

        config = tf.Qwen3MoeConfig(
            vocab_size=32000, hidden_size=self.width, num_hidden_layers=layers, num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads, head_dim=128, intermediate_size=self.inner,
            moe_intermediate_size=self.inner, num_experts=self.experts, num_experts_per_tok=self.chosen,
            decoder_sparse_step=1, use_cache=False, experts_implementation="grouped_mm",
        )  # fmt: skip
        return tf.Qwen3MoeForCausalLM(config).train()


MIXTURES = {
    "qwen3-30b": Mixture(2048, 768, 128, 8, 32, 4, 48),
    "gpt-oss-120b": Mixture(2880, 2880, 128, 4, 64, 8, 36),
}
"""Shapes of Qwen3-30B-A3B and gpt-oss-120b, both as stacks of Qwen3-MoE."""
LAYOUTS = {"qwen3-30b": ((8, 1), (8, 8), (64, 1), (64, 8), (64, 64)), "gpt-oss-120b": ((64, 1), (64, 8), (64, 64))}
"""(ranks, ep)."""


def speed(kind: str, ranks: tuple[int, ...]) -> float:
    """Bytes per second of one rank in a collective among `ranks`."""
    machines = {rank // MACHINE for rank in ranks}
    if len(machines) == 1:
        return costs.NETWORK
    here = len(ranks) // len(machines)
    if kind == "all_to_all":  # what goes to other machines, through one card
        return CARD * (len(ranks) - 1) / (len(ranks) - here)
    return min(costs.NETWORK, CARD * here)


def even_counts(model: str, ep: int, tokens: int) -> np.ndarray:
    """What the host reads in a layer: as many rows and pairs as random choices send to and from each rank."""
    from hf_dist.parallel.experts.routing_plan import packed

    k = MIXTURES[model].chosen
    rows = round(tokens * (1 - (1 - 1 / ep) ** k))
    return np.full((2, ep), packed(rows, tokens * k // ep))


@dataclass(frozen=True)
class Timed:
    """One step."""

    outcome: Outcome
    sent: Mapping[str, float]
    """Seconds of transfers by kind, each as if nothing ran beside it."""
    waits: list[str]
    """Where the host waits."""


def expected_exchange(model: str, ep: int, layers: int, tokens: int) -> float:
    """Seconds of the exchanges of a step on one machine, by hand: rows there and back, forward and backward, in bf16; ids and
    weights of the choices; counts."""
    mixture = MIXTURES[model]
    rows = ep * round(tokens * (1 - (1 - 1 / ep) ** mixture.chosen))
    row, choice = 2 * mixture.width, 4 * mixture.chosen
    sizes = [8 * ep, *(rows * choice for _ in range(3)), *(rows * row for _ in range(4))]
    return layers * sum(costs.transfer_seconds("all_to_all", nbytes, ep) for nbytes in sizes)


def run(rank: int, meet: str, model: str, world: int, ep: int, layers: int, tokens: int) -> Timed:
    """The last of some steps at stage 3."""
    with simulated_rank(world, rank) as (recorder, nccl):
        nccl.network = speed
        with recorder, answered(lambda tensor: even_counts(model, ep, tokens)):
            with torch.device(GPU):
                built = MIXTURES[model].build(layers)
            ids = torch.zeros(1, tokens, dtype=torch.long, device=GPU)
            config = shipped("zero3")
            config["expert_parallel"] = {"enabled": ep > 1, "autoep_size": ep}
            step = _ours(built, config)
            for number in range(STEPS):
                if number == STEPS - 1:
                    recorder.trace.mark(STEADY)
                step({"input_ids": ids, "labels": ids})
        trace = recorder.trace
        sent: dict[str, float] = {}
        for entry in trace.entries[trace.marks[STEADY] :]:
            if isinstance(entry, Launched) and entry.transfer is not None:
                sent[entry.transfer.kind] = sent.get(entry.transfer.kind, 0.0) + entry.seconds
        return Timed(replay([trace], mark=STEADY), sent, [wait.where for wait in trace.waits(STEADY)])


def main() -> None:
    """See the module."""
    from tests.gpu_sim.server import simulate

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--models", nargs="+", default=list(MIXTURES), choices=MIXTURES)
    given = parser.parse_args()
    print("| | ranks | ep | step ms | compute alone ms | weights alone ms | tokens alone ms | step / compute |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for model in given.models:
        for world, ep in LAYOUTS[model]:
            (found,) = simulate("tests.gpu_sim.timed_experts:run", model, world, ep, given.layers, given.tokens)
            tokens = found.sent.get("all_to_all", 0.0)
            parts = (found.outcome.seconds, found.outcome.busy["compute"], sum(found.sent.values()) - tokens, tokens)
            cells = (model, world, ep, *(f"{1e3 * seconds:.1f}" for seconds in parts))
            print(f"| {' | '.join(map(str, cells))} | {found.outcome.ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
