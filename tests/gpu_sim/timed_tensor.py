"""Steps of a Llama-3 8B of few layers whose matrices are cut, in the timed model: how much of what travels along `tp` shows.

    python -m tests.gpu_sim.timed_tensor [--size 8] [--layers 4] [--network 300 50]

With `tp_overlap_comm` backward's sums go on beside the weight gradients. As in `timed.py` one rank is simulated.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from hf_dist.tensors.linear_input import LinearInput
from tests.gpu_sim import costs
from tests.gpu_sim.rank import GPU, simulated_rank
from tests.gpu_sim.replay import Outcome, replay
from tests.gpu_sim.timed import LAYERS, STEPS, shipped
from tests.gpu_sim.trace import COMPUTE
from tests.gpu_sim.training import STEADY
from tests.scale.engines import OPTIMIZER, Case

CASE = replace(LAYERS, layers=4, vocabulary=32000)
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Variant = tuple[bool, bool]
"""Whether there are regions, whether sums begin early."""
VARIANTS: tuple[Variant, ...] = ((False, False), (False, True), (True, False), (True, True))


def config_of(size: int, *, regions: bool, overlap: bool) -> dict[str, Any]:
    """All ranks cut matrices; HF's loss does not have whole logits."""
    config = shipped("zero0")
    config["tensor_parallel"] = {"autotp_size": size, "tp_overlap_comm": overlap}
    config["hf_dist"] |= {"sequence_regions": regions, "tiled_loss": "auto"}
    return config


@contextmanager
def marked_inputs() -> Iterator[None]:
    """Inside, the input of a product that is computed another way stays a tensor without elements: those have no subclass."""
    marks: list[tuple[torch.Tensor, Product]] = []
    plain = functional.linear

    def of(tensor: torch.Tensor, answer: Product) -> torch.Tensor:
        marks[:] = [(tensor, answer)]  # by the hook in front of a module, whose product comes next
        return tensor

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not marks or marks[0][0] is not x:
            return plain(x, weight, bias)
        return marks.pop()[1](x, weight, bias)

    with mock.patch.object(LinearInput, "of", of), mock.patch.object(functional, "linear", linear):
        yield


def run(
    rank: int, meet: str, size: int, networks: list[float], case: Case, variants: Sequence[Variant] = VARIANTS
) -> dict[tuple[float, Variant], Outcome]:
    """The last of some steps of every variant. `networks`: bytes per second of a rank."""
    from hf_dist.parallel.tensor.choose import choose_plan
    from hf_dist.sharding.units import find_unit_modules

    with torch.device("meta"):
        model = case.llama()
    for regions in sorted({regions for regions, _ in variants}):
        # Verified with elements, and remembered for when there are none.
        choose_plan(model, size, find_unit_modules, None, regions)
    return {
        (network, variant): _steps(rank, size, network, case, *variant) for network in networks for variant in variants
    }


def _steps(rank: int, size: int, network: float, case: Case, regions: bool, overlap: bool) -> Outcome:
    import hf_dist

    with simulated_rank(size, rank) as (recorder, nccl), marked_inputs():
        nccl.network = network
        with recorder:
            with torch.device(GPU):
                model = case.llama()
            ids = torch.zeros(case.rows, case.seq, dtype=torch.long, device=GPU)
            optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)
            config = config_of(size, regions=regions, overlap=overlap)
            engine = hf_dist.initialize(model, config=config, optimizer=optimizer, device=GPU)
            for number in range(STEPS):
                if number == STEPS - 1:
                    recorder.trace.mark(STEADY)
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()
        return replay([recorder.trace], mark=STEADY)


def hidden(case: Case, size: int, network: float, *, regions: bool) -> float:
    """Seconds of backward's sums in a step that the weight gradients beside them last."""
    tokens, half = case.rows * case.seq, 2
    kind = "reduce_scatter" if regions else "all_reduce"
    one_sum = costs.transfer_seconds(kind, tokens * case.width * half, size, network)
    heads = case.width // case.heads
    columns = (case.width + 2 * case.kv_heads * heads, 2 * case.inner)  # of q, k, v; of gate and up
    beside = (2 * tokens * case.width * n / size / costs.FLOPS for n in columns)
    return case.layers * sum(min(one_sum, seconds) for seconds in beside)


def exposed(outcome: Outcome) -> float:
    """Seconds of a step in which the GPU computes nothing."""
    return outcome.seconds - outcome.busy[COMPUTE]


def main() -> None:
    """See the module."""
    from tests.gpu_sim.server import simulate

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--layers", type=int, default=CASE.layers)
    parser.add_argument("--network", nargs="+", type=float, default=[costs.NETWORK / 1e9, 50.0], help="GB per second")
    given = parser.parse_args()
    case = replace(CASE, layers=given.layers)
    print("| GB/s | | step ms | compute alone ms | travels ms | exposed ms | of it hidden, by the formula |")
    print("|--:|---|--:|--:|--:|--:|--:|")
    for network in given.network:
        (found,) = simulate("tests.gpu_sim.timed_tensor:run", given.size, [network * 1e9], case)
        for (_, (regions, overlap)), outcome in found.items():
            name = ("regions" if regions else "plain") + (", early" if overlap else "")
            travels = sum(outcome.busy.values()) - outcome.busy[COMPUTE]
            formula = hidden(case, given.size, network * 1e9, regions=regions) if overlap else 0.0
            times = (outcome.seconds, outcome.busy[COMPUTE], travels, exposed(outcome), formula)
            print("|", " | ".join([f"{network:g}", name, *(f"{1e3 * t:.2f}" for t in times)]), "|", flush=True)


if __name__ == "__main__":
    main()
