"""The step of Muon three ways, interleaved: owners, every rank gathers all, and as DeepSpeed's stage 3 does it.

    torchrun --nproc_per_node 4 -m tests.optim.bench_muon [hidden] [layers] [rounds]

Gathering all: one all-gather of momentum updates in bf16, and every rank orthogonalises every matrix. DeepSpeed's stage 3
(runtime/zero/stage3.py): an all-reduce of whole gradients, an all-gather of momentum, owners in round-robin, a broadcast of
updates and momenta. All three step the same fp32 shards; times are the slowest rank's, medians over the rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import hf_dist
from hf_dist.optim.muon import orthogonalised

_OPTIONS = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "eps": 1e-7, "ns_steps": 5}


def matrices(engine: Any) -> list[Any]:
    """What Muon steps, in the order of the model."""
    found = engine.fragments.members[0]._muon._owners.items
    return sorted(found, key=lambda o: o.slot.name)


def fragments(engine: Any) -> dict[Any, torch.Tensor]:
    """This rank's gradient of each matrix."""
    return {o: o.of(o.group.grad) for o in matrices(engine)}


def gathered(o: Any, part: torch.Tensor) -> torch.Tensor:
    """A whole matrix on every rank: padded parts, as lengths differ."""
    world, lengths = dist.get_world_size(), [o.length(rank) for rank in range(dist.get_world_size())]
    padded = part.new_zeros(max(lengths))
    padded[: part.numel()] = part
    out = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(out, padded)
    return torch.cat([t[:n] for t, n in zip(out, lengths, strict=True)]).view(o.shape)


def gather_all(engine: Any, momenta: dict[Any, torch.Tensor]) -> None:
    """Every rank computes every matrix."""
    for o, grad in fragments(engine).items():
        momenta[o].lerp_(grad, 0.05)
        update = orthogonalised(gathered(o, grad.lerp(momenta[o], 0.95).bfloat16()), _OPTIONS)
        o.of(o.group.source).add_(update.reshape(-1)[slice(*o.part(dist.get_rank()))], alpha=-1e-9)


def round_robin(engine: Any, momenta: dict[Any, torch.Tensor]) -> None:
    """DeepSpeed's stage 3, its collectives one after another."""
    rank, world = dist.get_rank(), dist.get_world_size()
    items = matrices(engine)
    for begin in range(0, len(items), world):
        some = items[begin : begin + world]
        wholes, old = {}, {}
        for o in some:
            whole = torch.zeros(o.numel)
            whole[slice(*o.part(rank))] = o.of(o.group.grad)
            dist.all_reduce(whole)
            wholes[o], old[o] = whole.view(o.shape), gathered(o, momenta[o])
        computed = {}
        if rank < len(some):
            mine = some[rank]
            new = old[mine].lerp(wholes[mine], 0.05)
            update = orthogonalised(wholes[mine].lerp(new, 0.95).bfloat16(), _OPTIONS).contiguous()
            computed = {mine: (update, new.bfloat16())}
        for k, o in enumerate(some):  # one all-gather of what the ranks computed, written as its broadcasts
            for n, kept in enumerate(("update", "momentum")):
                result = computed[o][n] if k == rank else torch.empty(o.shape, dtype=torch.bfloat16)
                dist.broadcast(result, k)
                share = result.reshape(-1)[slice(*o.part(rank))]
                if kept == "momentum":
                    momenta[o].copy_(share)
                else:
                    o.of(o.group.source).add_(share, alpha=-1e-9)


def main() -> None:
    """Print medians and ratios on rank 0."""
    hidden, layers, rounds = (int(v) for v in (*sys.argv[1:], *("512", "4", "7")[len(sys.argv) - 1 :]))
    torch.set_num_threads(1)
    shape = dict(hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=8)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **shape))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "Muon", "params": {"lr": 1e-9}},
    }
    engine = hf_dist.initialize(model, config=config)
    ids = torch.arange(16)[None]
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.sharded.reduce_rest()
    engine.sharded.finish_gradients()
    momenta = [{o: torch.zeros_like(part) for o, part in fragments(engine).items()} for _ in range(2)]
    muon = engine.fragments.members[0]._muon
    ways = {
        "owners": lambda: muon.step(lambda o: True),
        "every rank gathers all": lambda: gather_all(engine, momenta[0]),
        "round-robin, whole gradients": lambda: round_robin(engine, momenta[1]),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for number in range(rounds + 1):
            for name, run in ways.items():
                dist.barrier()
                start = time.perf_counter()
                run()
                slowest = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                if number:
                    times[name].append(slowest.item())
    if dist.get_rank() == 0:
        base = statistics.median(times["owners"])
        for name, values in times.items():
            print(f"{name}: {statistics.median(values):.3f} s, {statistics.median(values) / base:.2f} of owners")


if __name__ == "__main__":
    main()
