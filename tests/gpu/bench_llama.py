"""hf_dist stage 3 beside torch FSDP2 on one GPU: a random Llama of about 1.2B parameters, bf16, interleaved rounds.

    python tests/gpu/bench_llama.py [--rounds 3] [--steps 8]

Prints one JSON line per engine and round (median step seconds, peak GiB) and the ratios of the medians.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def make_model() -> Any:
    """About 1.2B parameters, fp32 masters fit beside the activations on an 80 GB card."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192,
        vocab_size=32000, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def hf_dist_step() -> Callable[[torch.Tensor], torch.Tensor]:
    """Stage 3, reduction in bf16 like FSDP2's below."""
    import hf_dist

    config = {
        "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
        "communication_data_type": "bf16", "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.0}},
    }  # fmt: skip
    engine = hf_dist.initialize(make_model(), config=config)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def fsdp2_step() -> Callable[[torch.Tensor], torch.Tensor]:
    """fully_shard per decoder layer and at the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cuda", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = make_model()
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


def measure(make: Callable[[], Callable[[torch.Tensor], torch.Tensor]], steps: int) -> dict[str, float]:
    """Median step time and peak memory after two steps of warm-up."""
    step = make()
    ids = torch.randint(0, 32000, (4, 2048), device="cuda")
    for _ in range(2):
        step(ids)
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = step(ids)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"step_s": statistics.median(times), "peak_gib": peak, "loss": loss.item()}


def main() -> None:
    """Interleave the engines, print every round and the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        os.environ.setdefault(key, value)
    dist.init_process_group("nccl")
    rows: dict[str, list[dict[str, float]]] = {"hf_dist": [], "fsdp2": []}
    for number in range(options.rounds):
        for name, make in (("hf_dist", hf_dist_step), ("fsdp2", fsdp2_step))[:: 1 if number % 2 == 0 else -1]:
            rows[name].append(measure(make, options.steps))
            print(json.dumps({"engine": name, "round": number, **rows[name][-1]}), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    for key in ("step_s", "peak_gib"):
        ours, theirs = (statistics.median(r[key] for r in rows[n]) for n in ("hf_dist", "fsdp2"))
        print(f"{key}: hf_dist / fsdp2 = {ours / theirs:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
