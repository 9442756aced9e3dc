"""A step of `engine.train_batch` under a pipeline against torch.distributed.pipelining, in the same two processes.

    python -m tests.parallel.pipeline.bench_step [--reps 7] [--dtypes fp32 bf16 mixed] [--schedules 1f1b gpipe] [--profile]

An HF Llama of 34M parameters in two stages of four blocks (the embedding in the first, norm and head in the second), 8
microbatches of 2 x 128 tokens, AdamW (fused), no clipping. torch's stages are written by hand from the same modules. `bf16`:
both sides step fp32 masters and add up gradients in bf16; `mixed`: ours adds them up in fp32, its default. Rounds are
interleaved, and losses of both sides must be equal in every one (`mixed`: in the first). CPU seconds are those of both
processes, all threads: less moved by what else runs on the machine.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import os
import pstats
import resource
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.harness import run_ranks

RANKS, MICROBATCHES, ROWS, LENGTH = 2, 8, 2, 128
HIDDEN, BLOCKS, VOCABULARY = 512, 8, 8192
WARMUP = 2
TOLERANCE = 1e-5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "mixed": torch.bfloat16}
Step = Callable[[torch.Tensor], float]
"""Takes the window's tokens [microbatches * rows, length]; returns its mean loss on the last rank."""


def build() -> nn.Module:
    """The model, equal on every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=BLOCKS, num_attention_heads=8,
        num_key_value_heads=8, intermediate_size=1376, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of both sides."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


class Ours:
    """The engine, ZeRO stage 0."""

    def __init__(self, schedule: str, dtype: str) -> None:
        import hf_dist

        model = build()
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": MICROBATCHES,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": DTYPES[dtype] == torch.bfloat16},
            "data_types": {"grad_accum_dtype": "bf16" if dtype == "bf16" else "fp32"},
            "communication_data_type": "bf16" if dtype == "bf16" else "fp32",
            "pipeline": {"stages": RANKS, "schedule": schedule, "partition_method": "uniform"},
        }
        ids = torch.zeros(ROWS, 8, dtype=torch.long)
        example = {"input_ids": ids, "labels": ids}
        self.engine = hf_dist.initialize(
            model, config=config, optimizer=adamw(model.parameters()), example_batch=example, device="cpu"
        )

    def step(self, ids: torch.Tensor) -> float:
        """One step."""
        window = [{"input_ids": part, "labels": part} for part in ids.chunk(MICROBATCHES)]
        return float(self.engine.train_batch(iter(window)))

    def count(self, ids: torch.Tensor) -> tuple[int, int]:
        """Of one step on this rank: most graphs alive at once, bytes sent."""
        from hf_dist.parallel.pipeline import runtime

        alive: weakref.WeakSet[Any] = weakref.WeakSet()
        peak = 0

        class Counted(runtime.StageGraph):
            def __init__(self, *args: Any) -> None:
                nonlocal peak
                super().__init__(*args)
                alive.add(self)
                peak = max(peak, len(alive))

        assert self.engine.pipeline is not None
        transport, original = self.engine.pipeline.transport, runtime.StageGraph
        before = transport.sent_nbytes
        runtime.StageGraph = Counted  # type: ignore[misc]
        try:
            self.step(ids)
        finally:
            runtime.StageGraph = original  # type: ignore[misc]
        return peak, transport.sent_nbytes - before


class HandStage(nn.Module):
    """Half of a Llama as one writes it for torch: embedding and blocks, or blocks, norm and head."""

    def __init__(self, model: Any, rank: int) -> None:
        super().__init__()
        half = BLOCKS // RANKS
        self.embed = model.model.embed_tokens if rank == 0 else None
        self.rotary = model.model.rotary_emb
        self.blocks = nn.ModuleList(model.model.layers[rank * half : (rank + 1) * half])
        self.norm, self.head = (model.model.norm, model.lm_head) if rank == RANKS - 1 else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        rotary = self.rotary(x, position_ids=positions)
        for block in self.blocks:
            x = block(x, attention_mask=None, position_embeddings=rotary, position_ids=positions, use_cache=False)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


class Torch:
    """torch.distributed.pipelining."""

    def __init__(self, schedule: str, dtype: str) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        self.rank = dist.get_rank()
        model: Any = build()
        module = HandStage(copy.deepcopy(model), self.rank)
        self.masters = [nn.Parameter(p.detach().clone()) for p in module.parameters()]
        self.weights = list(module.parameters())
        if dtype == "fp32":
            self.masters = self.weights
        for weight in self.weights:  # not the buffers: the frequencies of the rotary tables stay fp32
            weight.data = weight.data.to(DTYPES[dtype])
        self.optimizer = adamw(self.masters)
        self.stage = PipelineStage(module, self.rank, RANKS, torch.device("cpu"))
        function, size = model.loss_function, model.config.vocab_size
        kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
        self.schedule = kind(self.stage, MICROBATCHES, loss_fn=lambda out, target: function(out, target, size))

    def step(self, ids: torch.Tensor) -> float:
        """One step."""
        losses: list[torch.Tensor] = []
        if self.rank == 0:
            self.schedule.step(ids, return_outputs=False)
        else:
            self.schedule.step(target=ids, losses=losses, return_outputs=False)
        if self.masters is not self.weights:
            for master, weight in zip(self.masters, self.weights, strict=True):
                assert weight.grad is not None
                master.grad, weight.grad = weight.grad.float(), None
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.masters is not self.weights:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.masters)
        return float(torch.stack(losses).detach().mean()) if losses else float("nan")

    def count(self, ids: torch.Tensor) -> tuple[int, int]:
        """Of one step on this rank: most microbatches whose graph the stage holds; bytes are not counted."""
        forward, peak = self.stage.forward_one_chunk, 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal peak
            output = forward(*args, **kwargs)
            peak = max(peak, len(self.stage.fwd_cache))
            return output

        self.stage.forward_one_chunk = counted  # type: ignore[method-assign]
        self.step(ids)
        self.stage.forward_one_chunk = forward  # type: ignore[method-assign]
        return peak, 0


def timed(step: Step, ids: torch.Tensor) -> dict[str, float]:
    """One step that all ranks begin together."""

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    dist.barrier()
    before, start = cpu(), time.perf_counter()
    loss = step(ids)
    end = time.perf_counter()
    return {"start": start, "end": end, "cpu": cpu() - before, "loss": loss}


def worker(rank: int, world: int, cases: list[tuple[str, str]], reps: int, profile: bool) -> list[dict[str, Any]]:
    """Per case: what each side measured on this rank, round by round."""
    dist.init_process_group("gloo")
    found = []
    for schedule, dtype in cases:
        sides: dict[str, Any] = {"ours": Ours(schedule, dtype), "torch": Torch(schedule, dtype)}
        generator = torch.Generator().manual_seed(1)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        profiles = {name: cProfile.Profile(time.thread_time) for name in sides}
        for i in range(WARMUP + reps):
            ids = torch.randint(VOCABULARY, (MICROBATCHES * ROWS, LENGTH), generator=generator)
            for name in list(sides)[:: 1 if i % 2 else -1]:
                if profile and i >= WARMUP:
                    profiles[name].enable()
                rounds[name].append(timed(sides[name].step, ids))
                profiles[name].disable()
        counts = {name: side.count(ids) for name, side in sides.items()}
        found.append({"rounds": rounds, "counts": counts})
        if profile:
            for name, recorded in profiles.items():
                print(f"---- {schedule} {dtype} {name} rank {rank}: {reps} steps", flush=True)
                pstats.Stats(recorded).sort_stats("tottime").print_stats(24)
    return found


def report(case: tuple[str, str], by_rank: list[dict[str, Any]]) -> None:
    """Check the losses and print a row."""
    schedule, dtype = case
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for name in ("ours", "torch"):
        rounds = list(zip(*(rank["rounds"][name] for rank in by_rank), strict=True))
        seconds[name] = [max(r["end"] for r in row) - min(r["start"] for r in row) for row in rounds][WARMUP:]
        cpu[name] = [sum(r["cpu"] for r in row) for row in rounds][WARMUP:]
    losses = [[r["loss"] for r in by_rank[-1]["rounds"][name]] for name in ("ours", "torch")]
    differences = [abs(a - b) / abs(b) for a, b in zip(*losses, strict=True)]
    worst = max(differences[:1] if dtype == "mixed" else differences)
    assert worst < TOLERANCE, f"{case}: losses differ by {worst:.1e}: {losses}"
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["torch"], strict=True)]
    cpu_ratio = statistics.median(a / b for a, b in zip(cpu["ours"], cpu["torch"], strict=True))
    (ours_peak, nbytes), (torch_peak, _) = (by_rank[0]["counts"][name] for name in ("ours", "torch"))
    formula = MICROBATCHES * ROWS * LENGTH * HIDDEN * DTYPES[dtype].itemsize
    back = by_rank[1]["counts"]["ours"][1]
    ours, theirs = (statistics.median(seconds[name]) for name in ("ours", "torch"))
    print(
        f"{schedule:5} {dtype:5}  ours {ours:.3f} s  torch {theirs:.3f} s"
        f"  ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})  CPU ratio {cpu_ratio:.3f}"
        f"  losses within {worst:.1e}  in flight on stage 0: {ours_peak}, torch {torch_peak}"
        f"  bytes there and back {nbytes}, {back}, formula {formula}",
        flush=True,
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe"], choices=["1f1b", "gpipe"])
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    cases = [(schedule, dtype) for dtype in arguments.dtypes for schedule in arguments.schedules]
    before = os.getloadavg()[0]
    by_rank = run_ranks(worker, RANKS, (cases, arguments.reps, arguments.profile), timeout=3000)
    print(f"load {before:.1f} before, {os.getloadavg()[0]:.1f} at the end (two of it are these ranks)")
    for i, case in enumerate(cases):
        report(case, [rank[i] for rank in by_rank])


if __name__ == "__main__":
    main()
