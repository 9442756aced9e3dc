"""A step with cut matrices against transformers' (DTensor) and DeepSpeed's (AutoTP), in the same two processes.

    python -m tests.parallel.tensor.bench_step [--turns 8] [--models tiny w1 w2]

HF Llama, AdamW, no clipping, fp32, ZeRO stage 0. Engines take turns of some steps on the same batches; losses must agree.
Ratios: median over turns of an engine's seconds by those of each peer. Processor time of rank 0 does not depend on who else
uses the machine. Collectives: calls of one forward and backward, ours as
`comm_log.record` has them (on gloo some are made of several transfers), the others' as torch dispatches them.
DeepSpeed is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch.distributed.tensor.debug import CommDebugMode

from hf_dist.dist import comm_counter
from tests.harness import run_ranks

MODELS: dict[str, dict[str, Any]] = {
    "tiny": dict(hidden_size=128, num_hidden_layers=4, intermediate_size=352, vocab_size=1024, rows=4, length=64),
    "w1": dict(hidden_size=512, num_hidden_layers=6, intermediate_size=1408, vocab_size=6144, rows=4, length=256),
    "w2": dict(hidden_size=768, num_hidden_layers=12, intermediate_size=2048, vocab_size=25600, rows=2, length=256),
}
OURS: dict[str, dict[str, Any]] = {
    "ours": {"hf_dist": {"sequence_regions": False}},
    "ours, regions": {"hf_dist": {"sequence_regions": True}},
    "ours, overlapped": {"hf_dist": {"sequence_regions": False}, "tensor_parallel": {"tp_overlap_comm": True}},
}
PEER, DEEPSPEED = "transformers", "deepspeed"
STEPS, WARMUP, TOLERANCE = 3, 2, 1e-4
Batch = dict[str, torch.Tensor]
Step = Callable[[Batch], float]


def build(kind: str) -> Any:
    """The model, equal on every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {key: value for key, value in MODELS[kind].items() if key not in ("rows", "length")}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8, use_cache=False)
    return LlamaForCausalLM(config).train()


def ours(kind: str, world: int, more: dict[str, Any]) -> tuple[Step, Callable[[Batch], Any]]:
    """(a step; a forward and backward) of the engine."""
    import hf_dist

    model = build(kind)
    config = {
        "train_micro_batch_size_per_gpu": MODELS[kind]["rows"],
        "gradient_clipping": 0,
        **more,
        "tensor_parallel": {"autotp_size": world, **more.get("tensor_parallel", {})},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine = hf_dist.initialize(model, config=config, optimizer=optimizer)

    def passes(batch: Batch) -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        return float(loss.detach())

    def step(batch: Batch) -> float:
        loss = passes(batch)
        engine.step()
        return loss

    return step, passes


def theirs(kind: str, world: int, folder: str) -> tuple[Step, Callable[[Batch], Any]]:
    """The same of transformers' DTensor plan."""
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=world)).train()
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizers = [torch.optim.AdamW(group, lr=1e-4, fused=True) for group in (cut, whole)]

    def passes(batch: Batch) -> float:
        loss = model(**batch).loss
        loss.backward()
        return float(loss.detach())

    def step(batch: Batch) -> float:
        loss = passes(batch)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step, passes


def deepspeeds(kind: str, world: int) -> tuple[Step, Callable[[Batch], Any]]:
    """The same of DeepSpeed's AutoTP."""
    import deepspeed  # type: ignore[import-not-found, unused-ignore]

    model = build(kind)
    config = {
        "train_micro_batch_size_per_gpu": MODELS[kind]["rows"],
        "gradient_clipping": 0,
        "tensor_parallel": {"autotp_size": world},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def passes(batch: Batch) -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        return float(loss.detach())

    def step(batch: Batch) -> float:
        loss = passes(batch)
        engine.step()
        return loss

    return step, passes


def measure(rank: int, world: int, kind: str, folder: str, turns: int) -> dict[str, Any]:
    """Seconds per turn, processor seconds of this rank, and collectives of a pass, by engine."""
    import os

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world))
    engines = {name: ours(kind, world, more) for name, more in OURS.items()}
    engines[PEER] = theirs(kind, world, folder)
    if find_spec(DEEPSPEED) is not None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        engines[DEEPSPEED] = deepspeeds(kind, world)
    rows, length = MODELS[kind]["rows"], MODELS[kind]["length"]
    g = torch.Generator().manual_seed(1)
    losses: dict[str, list[float]] = {name: [] for name in engines}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    busy: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(-WARMUP, turns):
        ids = [torch.randint(0, MODELS[kind]["vocab_size"], (rows, length), generator=g) for _ in range(STEPS)]
        for name, (step, _) in engines.items():
            start, begun = time.perf_counter(), time.process_time()
            losses[name] += [step({"input_ids": x, "labels": x}) for x in ids]
            if turn >= 0:
                seconds[name].append((time.perf_counter() - start) / STEPS)
                busy[name].append((time.process_time() - begun) / STEPS)
    calls = {}
    batch = {"input_ids": ids[0], "labels": ids[0]}
    for name, (_, passes) in engines.items():
        calls[name] = _collectives(name, lambda passes=passes: passes(batch))
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses[name], losses[PEER], strict=True))
        assert worst < TOLERANCE, (name, worst)
    return {"seconds": seconds, "busy": busy, "calls": calls}


def _collectives(engine: str, passes: Callable[[], Any]) -> dict[str, int]:
    """Calls by operation. torch's counter looks at every tensor, and so at logits that ours leaves where they are."""
    if engine in (PEER, DEEPSPEED):
        with CommDebugMode() as mode:
            passes()
        return {str(op).split(".")[-1]: count for op, count in mode.get_comm_counts().items() if count}
    with comm_counter.record() as log:
        passes()
    return dict(Counter(e.op for e in log.entries if e.axis == "tp"))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    given = parser.parse_args()
    print("| model | engine | seconds | by transformers | by DeepSpeed | processor time by both | collectives |")
    print("|---|---|--:|--:|--:|--:|---|")
    for kind in given.models:
        with tempfile.TemporaryDirectory() as folder:
            build(kind).save_pretrained(folder)
            found = run_ranks(measure, 2, (kind, folder, given.turns), timeout=540)[0]
        seconds = found["seconds"]
        for name, times in seconds.items():
            ratios = [ratio(times, seconds[peer]) if peer in seconds else "" for peer in (PEER, DEEPSPEED)]
            busy = [ratio(found["busy"][name], own) for peer, own in found["busy"].items() if peer in (PEER, DEEPSPEED)]
            row = [kind, name, f"{statistics.median(times):.3f}", *ratios, ", ".join(busy), str(found["calls"][name])]
            print("|", " | ".join(row), "|", flush=True)


def ratio(times: list[float], others: list[float]) -> str:
    """Median and quartiles over turns."""
    ratios = sorted(a / b for a, b in zip(times, others, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return f"{middle:.2f} ({low:.2f}, {high:.2f})"


if __name__ == "__main__":
    main()
