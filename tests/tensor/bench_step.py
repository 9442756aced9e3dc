"""A step with cut matrices against transformers' own tensor parallelism (DTensor), in the same two processes.

    python -m tests.tensor.bench_step [--turns 8] [--models tiny w1]

HF Llama, AdamW, no clipping, fp32, ZeRO stage 0. Engines take turns of some steps on the same batches; losses must agree.
Ratio: median over turns of our seconds by theirs. Collectives: calls of one forward and backward, ours as
`collectives.record` has them (on gloo some are made of several transfers), transformers' as torch dispatches them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor.debug import CommDebugMode

from hf_dist import collectives
from tests.harness import run_ranks

MODELS: dict[str, dict[str, Any]] = {
    "tiny": dict(hidden_size=128, num_hidden_layers=4, intermediate_size=352, vocab_size=1024, rows=4, length=64),
    "w1": dict(hidden_size=512, num_hidden_layers=6, intermediate_size=1408, vocab_size=6144, rows=4, length=256),
}
OURS: dict[str, dict[str, Any]] = {
    "ours": {"hf_dist": {"sequence_regions": False}},
    "ours, regions": {"hf_dist": {"sequence_regions": True}},
    "ours, overlapped": {"hf_dist": {"sequence_regions": False}, "tensor_parallel": {"tp_overlap_comm": True}},
}
PEER = "transformers"
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


def measure(rank: int, world: int, kind: str, folder: str, turns: int) -> dict[str, Any]:
    """Seconds per turn and collectives of a pass, by engine."""
    import os

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    engines = {name: ours(kind, world, more) for name, more in OURS.items()}
    engines[PEER] = theirs(kind, world, folder)
    rows, length = MODELS[kind]["rows"], MODELS[kind]["length"]
    g = torch.Generator().manual_seed(1)
    losses: dict[str, list[float]] = {name: [] for name in engines}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(-WARMUP, turns):
        ids = [torch.randint(0, MODELS[kind]["vocab_size"], (rows, length), generator=g) for _ in range(STEPS)]
        for name, (step, _) in engines.items():
            start = time.perf_counter()
            losses[name] += [step({"input_ids": x, "labels": x}) for x in ids]
            if turn >= 0:
                seconds[name].append((time.perf_counter() - start) / STEPS)
    calls = {}
    batch = {"input_ids": ids[0], "labels": ids[0]}
    for name, (_, passes) in engines.items():
        calls[name] = _collectives(name, lambda passes=passes: passes(batch))
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses[name], losses[PEER], strict=True))
        assert worst < TOLERANCE, (name, worst)
    return {"seconds": seconds, "calls": calls}


def _collectives(engine: str, passes: Callable[[], Any]) -> dict[str, int]:
    """Calls by operation. torch's counter looks at every tensor, and so at logits that ours leaves where they are."""
    if engine == PEER:
        with CommDebugMode() as mode:
            passes()
        return {str(op).split(".")[-1]: count for op, count in mode.get_comm_counts().items() if count}
    with collectives.record() as log:
        passes()
    return dict(Counter(e.op for e in log.entries if e.axis == "tp"))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    given = parser.parse_args()
    print("| model | engine | seconds | by transformers | quartiles | collectives |\n|---|---|--:|--:|---|---|")
    for kind in given.models:
        with tempfile.TemporaryDirectory() as folder:
            build(kind).save_pretrained(folder)
            found = run_ranks(measure, 2, (kind, folder, given.turns), timeout=540)[0]
        for name, times in found["seconds"].items():
            ratios = sorted(a / b for a, b in zip(times, found["seconds"][PEER], strict=True))
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            row = [kind, name, f"{statistics.median(times):.3f}", f"{middle:.2f}", f"{low:.2f}, {high:.2f}"]
            print("|", " | ".join([*row, str(found["calls"][name])]), "|", flush=True)


if __name__ == "__main__":
    main()
