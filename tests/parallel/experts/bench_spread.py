"""Steps of a wide, shallow mixture on CPU ranks, engines in turn: python -m tests.parallel.experts.bench_spread [--wide]
[--rounds 6]

All engines live in the same processes and take turns of a few steps on the same cores; a ratio is the median over the turns.
Shapes: Qwen3-MoE, 64 experts of which 4 are chosen, 4 layers, 512 tokens per rank; 52M parameters, with --wide four times.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.harness import run_ranks

ZERO3: dict[str, Any] = {"stage": 3}
ENGINES: dict[str, dict[str, Any] | None] = {
    "ZeRO-3": {"zero_optimization": ZERO3},
    "ZeRO-3, ep 2": {"zero_optimization": ZERO3, "expert_parallel": {"enabled": True, "autoep_size": 2}},
    "ZeRO-1, ep 2": {"zero_optimization": {"stage": 1}, "expert_parallel": {"enabled": True, "autoep_size": 2}},
    "DDP": None,
    "FSDP2": None,
    "transformers, ep 2": None,
    "DeepSpeed ZeRO-1, ep 2": None,
    "DeepSpeed ZeRO-2, ep 2": None,
}
"""With a JSON: ours. transformers: `DistributedConfig(fsdp_size=2, ep_size=2)`; DeepSpeed: AutoEP, where it is installed."""
VOCAB, ROWS, LENGTH = 512, 2, 256
Step = Callable[[torch.Tensor], float]


def build(width: int) -> Any:
    """The same weights on every call."""
    import transformers as tf

    torch.manual_seed(0)
    config = tf.Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=width, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        head_dim=width // 4, intermediate_size=width, moe_intermediate_size=width, num_experts=64, num_experts_per_tok=4,
        decoder_sparse_step=1, use_cache=False, experts_implementation="grouped_mm",
    )  # fmt: skip
    return tf.Qwen3MoeForCausalLM(config).train()


def engine(name: str, width: int) -> Step:
    """One optimizer step of the engine, which returns the loss."""
    model = build(width)
    config = ENGINES[name]
    if config is not None:
        import hf_dist

        sizes = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 1}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        ours = hf_dist.initialize(model, config={**sizes, **config}, optimizer=optimizer, device="cpu")

        def own(ids: torch.Tensor) -> float:
            loss = ours(input_ids=ids, labels=ids).loss
            ours.backward(loss)
            ours.step()
            return loss.item()

        return own
    if name.startswith("DeepSpeed"):
        return deepspeed_engine(model, stage=int(name.split("-")[1][0]))
    wrapped: Any = model
    if name.startswith("transformers"):
        wrapped = spread_by_transformers(model)
    elif name == "DDP":
        wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    how = {"DDP": {"fused": True}, "FSDP2": {"foreach": True}}.get(name, {"foreach": False})
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, **how)

    def step(ids: torch.Tensor) -> float:
        loss = wrapped(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def spread_by_transformers(model: Any) -> Any:
    """The same weights, read by a model that transformers spreads: FSDP2 for what is no expert, tokens that travel."""
    import tempfile

    import transformers as tf
    from transformers.distributed import DistributedConfig

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    spread = DistributedConfig(fsdp_size=dist.get_world_size(), ep_size=dist.get_world_size())
    wanted = {"distributed_config": spread, "experts_implementation": "grouped_mm", "dtype": torch.float32}
    return tf.Qwen3MoeForCausalLM.from_pretrained(folder[0], **wanted).train()


def deepspeed_engine(model: Any, stage: int) -> Step:
    """AutoEP, with torch's AdamW, made by DeepSpeed: it puts experts into groups of their own."""
    import deepspeed
    from transformers.utils import output_capturing

    def get(self: Any, key: Any, default: Any = None) -> Any:
        return dict.get(self, key if isinstance(key, str) else str(type(key))) or (default or {})

    # DeepSpeed 0.19.8 gives the table of transformers 5.23 a default, which it does not take.
    output_capturing._CanRecordRegistry.get = get
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "fused": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "expert_parallel": {"enabled": True, "autoep_size": 2},
    }
    theirs, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)

    def step(ids: torch.Tensor) -> float:
        loss = theirs(input_ids=ids, labels=ids).loss
        theirs.backward(loss)
        theirs.step()
        return loss.item()

    return step


def measure(
    rank: int, world: int, names: list[str], width: int, rounds: int, steps: int, verbose: bool = False
) -> dict[str, Any]:
    """Seconds of a step by engine and turn, processor seconds, and the last loss."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    ready: dict[str, Step] = {}
    for name in names:
        try:
            ready[name] = engine(name, width)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if verbose:
                traceback.print_exc()
    g = torch.Generator().manual_seed(rank)
    batches = [torch.randint(0, VOCAB, (ROWS, LENGTH), generator=g) for _ in range(rounds * steps + 2)]
    for name, step in ready.items():
        found[name] = {"seconds": [], "cpu": [], "losses": [step(ids) for ids in batches[:2]]}
    for turn in range(rounds):
        for name, step in ready.items():
            mine = batches[2 + turn * steps :][:steps]
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            losses = [step(ids) for ids in mine]
            dist.barrier()
            found[name]["seconds"].append((time.perf_counter() - start) / steps)
            found[name]["cpu"].append((time.process_time() - cpu) / steps)
            found[name]["losses"] += losses
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--width", type=int, help="of hidden states and experts")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--verbose", action="store_true", help="tracebacks of engines that do not start")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    asked = parser.parse_args()
    width = asked.width or (512 if asked.wide else 256)
    found = run_ranks(measure, 2, (asked.engines, width, asked.rounds, asked.steps, asked.verbose), timeout=460)
    base = found[0][asked.engines[0]]
    print(f"| engine | step / {asked.engines[0]} (quartiles) | cpu / {asked.engines[0]} | seconds | loss |")
    print("|---|--:|--:|--:|--:|")
    for name in asked.engines:
        row = found[0][name]
        if isinstance(row, str):
            print(f"| {name} | {row} |")
            continue
        ratios = sorted(a / b for a, b in zip(row["seconds"], base["seconds"], strict=True))
        cpu = statistics.median(a / b for a, b in zip(row["cpu"], base["cpu"], strict=True))
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
        middle, seconds = statistics.median(ratios), statistics.median(row["seconds"])
        print(
            f"| {name} | {middle:.2f} ({low:.2f}, {high:.2f}) | {cpu:.2f} | {seconds:.2f} | {row['losses'][-1]:.5f} |"
        )


if __name__ == "__main__":
    main()
