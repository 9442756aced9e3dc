"""Steps in the timed model beside the times that `hf-dist plan --gpus` looks by: `python -m tests.gpu_sim.timed_search`.

Layers of Llama-3 8B at every stage of ZeRO on 8 ranks. Attention is one fused kernel here, as the search counts it: left to
itself torch takes the kernels that write all scores for tensors without elements.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from hf_dist.config import load_config, resolve_without_trainer
from hf_dist.planning.hardware import Hardware
from hf_dist.planning.layouts import Layout, Wanted
from hf_dist.planning.memory_plan import Limits
from hf_dist.planning.search import Search
from hf_dist.planning.step_time import StepTime
from tests.gpu_sim import costs, timed
from tests.gpu_sim.replay import Outcome
from tests.gpu_sim.trace import COMPUTE
from tests.scale.engines import CLIPPING, Case

WORLD = 8


@contextmanager
def fused_attention() -> Iterator[None]:
    """Inside, attention without a mask is one kernel."""
    plain = functional.scaled_dot_product_attention

    def fused(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        if attn_mask is not None or not query.is_cuda:
            return plain(query, key, value, attn_mask, *args, **kwargs)
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
        causal = bool(kwargs.get("is_causal", False))
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
        return found[0]  # type: ignore[no-any-return]

    with mock.patch.object(functional, "scaled_dot_product_attention", fused):
        yield


def run(rank: int, meet: str, stage: int, network: float, case: Case, wires: dict[str, Any] | None = None) -> Outcome:
    """The last of some steps; `wires`: keys of `hf_dist.wires`."""
    with fused_attention():
        return timed.run(rank, meet, f"zero{stage}", WORLD, network, case, {}, wires)


def same_hardware() -> Hardware:
    """The speeds of this model, as the search has them."""
    float8 = {"float8": costs.FLOAT8, "float8_rows": costs.FLOAT8_ROWS}
    links = {"inside": costs.NETWORK, "host": costs.HOST_LINK, "latency": costs.LATENCY}
    return Hardware(flops=costs.FLOPS, memory=costs.MEMORY, **float8, **links)


def looked_up(stage: int, network: float, case: Case, wires: dict[str, Any] | None = None) -> StepTime:
    """The same step, as the search takes it to be."""
    with torch.device("meta"):
        model = case.llama()
    own = {"gradient_clipping": CLIPPING, "hf_dist": {"tiled_loss": False, "wires": wires or {}}}
    read = load_config({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, **own})
    config = resolve_without_trainer(read, data_ranks=1, hidden_size=case.width, on_gpu=True)
    speeds = replace(same_hardware(), inside=network, between=network, ranks_per_machine=WORLD)
    search = Search(model, config, Wanted(WORLD, WORLD, case.seq, WORLD), Limits(1 << 50, None, WORLD), speeds)
    found = search.plan(Layout(dp_shard=WORLD, stage=stage))
    assert found is not None
    return found.time


def main() -> None:
    """See the module."""
    from tests.gpu_sim.server import simulate

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--network", nargs="+", type=float, default=[costs.NETWORK / 1e9, 50.0], help="GB per second")
    parser.add_argument("--wires", type=json.loads, default={}, help="keys of hf_dist.wires, JSON")
    given = parser.parse_args()
    case = replace(timed.LAYERS, layers=given.layers)
    print("| ZeRO | GB/s | simulated ms | of it computing | shows | search ms | computing | shows |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for network in given.network:
        for stage in given.stages:
            (outcome,) = simulate("tests.gpu_sim.timed_search:run", stage, network * 1e9, case, given.wires)
            found = looked_up(stage, network * 1e9, case, given.wires)
            busy = outcome.busy[COMPUTE]
            times = (outcome.seconds, busy, outcome.seconds - busy)
            times += (found.seconds, found.seconds - found.exposed, found.exposed)
            print("|", " | ".join([str(stage), f"{network:g}", *(f"{1e3 * t:.1f}" for t in times)]), "|", flush=True)


if __name__ == "__main__":
    main()
