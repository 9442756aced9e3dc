"""hf_dist stage 3 beside torch FSDP2 on one GPU: a random Llama of about 1.2B parameters, bf16, interleaved rounds.

    python -m tests.gpu.bench_llama [--rounds 3] [--steps 8] [--small]

Prints one JSON line per engine and round (median step seconds, peak GiB) and the ratios of the medians. `--small` is a
rehearsal of the program, on a CPU where there is no GPU: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hf_dist.dist.ports import HeldPort
from tests.gpu.results import record


@dataclass(frozen=True)
class Work:
    """A model and what it is given in a step."""

    hidden: int
    layers: int
    heads: int
    inner: int
    vocabulary: int
    rows: int
    seq: int
    device: torch.device

    def make_model(self) -> Any:
        """With random weights, the same each time."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=self.hidden, num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 4, intermediate_size=self.inner, vocab_size=self.vocabulary, use_cache=False,
            attn_implementation="sdpa",
        )  # fmt: skip
        return LlamaForCausalLM(config)


def work(small: bool) -> Work:
    """1.2B parameters, whose fp32 masters fit beside the activations on an 80 GB card, or next to nothing."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if small:
        return Work(32, 2, 4, 48, 101, 2, 16, device)
    return Work(2048, 16, 32, 8192, 32000, 4, 2048, device)


Step = Callable[[torch.Tensor], torch.Tensor]


def hf_dist_step(work: Work) -> Step:
    """Stage 3, reduction in bf16 like FSDP2's below."""
    import hf_dist

    config = {
        "train_micro_batch_size_per_gpu": work.rows, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
        "communication_data_type": "bf16", "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.0}},
    }  # fmt: skip
    engine = hf_dist.initialize(work.make_model(), config=config, device=work.device)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def fsdp2_step(work: Work) -> Step:
    """fully_shard per decoder layer and at the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(work.device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = work.make_model().to(work.device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measure(make: Callable[[Work], Step], work: Work, steps: int) -> dict[str, float]:
    """Median step time and peak memory after two steps of warm-up."""
    step = make(work)
    on_gpu = work.device.type == "cuda"
    ids = torch.randint(0, work.vocabulary, (work.rows, work.seq), device=work.device)
    for _ in range(2):
        step(ids)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        if on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = step(ids)
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return {"step_s": statistics.median(times), "peak_gib": peak, "loss": loss.item()}


def main() -> None:
    """Interleave the engines, print every round and the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    chosen = work(options.small)
    if chosen.device.type == "cpu" and not options.small:
        raise SystemExit("no GPU: only --small makes sense here")
    for key, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(HeldPort().number),
    }.items():
        os.environ.setdefault(key, value)
    dist.init_process_group("nccl" if chosen.device.type == "cuda" else "gloo")
    rows: dict[str, list[dict[str, float]]] = {"hf_dist": [], "fsdp2": []}
    for number in range(options.rounds):
        for name, make in (("hf_dist", hf_dist_step), ("fsdp2", fsdp2_step))[:: 1 if number % 2 == 0 else -1]:
            rows[name].append(measure(make, chosen, options.steps))
            print(json.dumps({"engine": name, "round": number, **rows[name][-1]}), flush=True)
            gc.collect()
            if chosen.device.type == "cuda":
                torch.cuda.empty_cache()
    for key, what in (("step_s", "seconds per step"), ("peak_gib", "peak, GiB")):
        ours, theirs = (statistics.median(r[key] for r in rows[n]) for n in ("hf_dist", "fsdp2"))
        if theirs:
            print(f"{what}: hf_dist / FSDP2 = {ours / theirs:.3f}")
            record("bench", {"what": what, "ours": ours, "theirs": theirs})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
