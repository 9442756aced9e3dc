"""Long rows on two processes: DistTrainer, and the stock Trainer with DeepSpeed's Ulysses and torch's context_parallel.

    python -m tests.parallel.sequence.bench_step [--rounds 3] [--lengths 8192 16384 32768] [--steps 3 3 1] [--engines ...]

A small Llama in fp32, AdamW, clipping, weights sharded (ZeRO-3; FSDP2 that reshards), one row a step, the same rows. Engines
take turns: a round starts two processes of each, which train on rows of every length; the first step of a length is not timed.
Seconds: from the beginning to the end of a step, of the slower rank; median and range. Ratios: an engine's median by ours in
the same round; median and range of rounds. Processor time: of both ranks, whoever else uses the machine. Memory: the highest
resident memory of a rank at a length, above that of a process without a model. Losses and norms of all steps must agree.

torch's context_parallel has no kernel on CPUs ("aten._scaled_dot_product_flash_attention_for_cpu.default does not have a
sharding strategy registered"): here its ring is handed CPU's flash kernel; loop, exchanges and merging are torch's.

In the stock Trainer DeepSpeed trains on each row as often as a sequence has ranks: all of them load it, and its adapter
takes these for different rows. So the others get each row twice. DeepSpeed is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hf_dist.dist.ports import HeldPort

WORLD, TOLERANCE = 2, 1e-4
MODEL: dict[str, Any] = dict(
    hidden_size=64,
    num_hidden_layers=2,
    intermediate_size=176,
    vocab_size=2048,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=1 << 20,
    use_cache=False,
)
OURS = {
    "hf_dist": "ulysses",
    "hf_dist, gather": "gather",
    "hf_dist, ring": "ring",
}
PEERS = ("deepspeed", "torch")
Result = dict[str, Any]


def rows(lengths: list[int], steps: list[int], times: int) -> list[dict[str, torch.Tensor]]:
    """Each row so many `times`, for steps of every length: one that is not timed, then `steps`."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for length, count in zip(lengths, steps, strict=True):
        for _ in range((count + 1) // WORLD):
            ids = torch.rand(length, generator=generator).pow(4).mul(MODEL["vocab_size"]).long()
            found += [{"input_ids": ids, "labels": ids, "position_ids": torch.arange(length)}] * times
    return found


# ---- one rank


def arguments(folder: str, steps: int) -> dict[str, Any]:
    """What every Trainer is told."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": 1,
        "max_steps": steps,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def ours(exchange: str, given: dict[str, Any]) -> tuple[Any, Any]:
    """(class of Trainer, its arguments)"""
    from hf_dist import DistTrainer, DistTrainingArguments

    config = {
        "zero_optimization": {"stage": 3},
        "sequence_parallel_size": WORLD,
        "hf_dist": {"sequence_parallel": exchange, "stall_report_seconds": 0},
    }
    return DistTrainer, DistTrainingArguments(**given, dist_config=config)


def deepspeeds(given: dict[str, Any]) -> tuple[Any, Any]:
    """The same of DeepSpeed's Ulysses, as transformers' documentation sets it up."""
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig
    from transformers import Trainer, TrainingArguments

    config = {
        "zero_optimization": {"stage": 3},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW, as the others
        "zero_allow_untested_optimizer": True,
    }
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    layout = ParallelismConfig(sp_backend="deepspeed", sp_size=WORLD, dp_shard_size=1, sp_handler=handler)
    return Trainer, TrainingArguments(**given, parallelism_config=layout, deepspeed=config)


def torchs(given: dict[str, Any]) -> tuple[Any, Any]:
    """The same of torch's context_parallel under FSDP2."""
    from accelerate.parallelism_config import ParallelismConfig
    from transformers import Trainer, TrainingArguments

    from hf_dist.tools.bench.engines.accelerate_fsdp2 import _shard_on_cpus

    _shard_on_cpus()
    ring_on_cpus()
    options = {
        "version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    }
    layout = ParallelismConfig(cp_size=WORLD, dp_shard_size=1)
    return Trainer, TrainingArguments(**given, parallelism_config=layout, fsdp=True, fsdp_config=options)


def ring_on_cpus() -> None:
    """Have torch's ring call CPU's flash kernel, as it calls that of CUDA."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def like(tensor: torch.Tensor, other: Any) -> Any:
        return DTensor.from_local(tensor, other.device_mesh, other.placements, run_check=False)

    def forward(op: Any, args: Any, kwargs: Any) -> Any:
        query, key, value, dropout, is_causal = (*args, *(0.0, False)[len(args) - 3 :])
        local = {name: t.to_local() for name, t in (("query", query), ("key", key), ("value", value))}
        out, lse = theirs._templated_ring_attention(
            query.device_mesh.get_group(),
            2,
            lambda q, k, v, **rest: kernel(q, k, v, **rest),
            is_causal=is_causal,
            dropout_p=dropout,
            scale=kwargs.get("scale"),
            **local,
        )
        return like(out, query), like(lse, query)

    def backward(op: Any, args: Any, kwargs: Any) -> Any:
        names = ("grad_out", "query", "key", "value", "out", "logsumexp")
        local = {name: t.to_local() for name, t in zip(names, args[:6], strict=True)}
        found = theirs._templated_ring_attention_backward(
            args[1].device_mesh.get_group(),
            2,
            backward_kernel,
            grad_out_name="grad_out",
            dropout_p=args[6],
            is_causal=args[7],
            scale=kwargs.get("scale"),
            **local,
        )
        return tuple(like(grad, args[1]) for grad in found[:3])

    theirs.custom_ops |= {kernel: forward, backward_kernel: backward}


def resident(key: str) -> int:
    """Bytes of resident memory: VmRSS now, VmHWM at most."""
    match = re.search(key + r":\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def rank(engine: str, lengths: list[int], steps: list[int], folder: str) -> None:
    """Train, and leave what was measured in `folder`."""
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

    data = rows(lengths, steps, 1 if engine == "deepspeed" else WORLD)
    given = arguments(folder, sum(steps) + len(steps))
    make = {"deepspeed": deepspeeds, "torch": torchs}.get(engine)
    cls, args = make(given) if make else ours(OURS[engine], given)
    transformers.logging.set_verbosity_error()
    base = resident("VmRSS")
    stamps: list[tuple[float, float]] = []
    peaks: list[int] = []

    def stamp() -> None:
        stamps.append((time.perf_counter(), time.process_time()))

    class Clock(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
            stamp()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stamp()
            peaks.append(resident("VmHWM") - base)

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL)).train()
    trainer: Any = cls(model=model, args=args, train_dataset=data, callbacks=[Clock()])
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    found = {
        "seconds": [b[0] - a[0] for a, b in zip(stamps[::2], stamps[1::2], strict=True)],
        "busy": [b[1] - a[1] for a, b in zip(stamps[::2], stamps[1::2], strict=True)],
        "peaks": peaks,
        "losses": [entry["loss"] for entry in logs],
        "norms": [entry["grad_norm"] for entry in logs],
    }
    Path(folder, f"rank_{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of some peers abort when the interpreter ends


# ---- all engines


def run(engine: str, lengths: list[int], steps: list[int]) -> list[Result]:
    """What each rank measured. Raises `RuntimeError` with the end of what a failing rank printed."""
    with tempfile.TemporaryDirectory() as folder, HeldPort() as port:
        spec = json.dumps([engine, lengths, steps, folder])
        common = {
            **os.environ,
            **{"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "LOCAL_SIZE": str(WORLD)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.number), "OMP_NUM_THREADS": "1"},
            **{"DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"},
            **({"ACCELERATE_USE_CPU": "true"} if engine in OURS else {}),  # with it accelerate refuses both peers
        }
        logs = [Path(folder, f"rank_{r}.log") for r in range(WORLD)]
        children = []
        for r, log in enumerate(logs):
            environment = {**common, "RANK": str(r), "LOCAL_RANK": str(r)}
            command = [sys.executable, "-m", "tests.parallel.sequence.bench_step", "--one", spec]
            with log.open("wb") as out:
                children.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
        until = time.monotonic() + 400
        try:
            while any(child.poll() is None for child in children) and not any(child.returncode for child in children):
                if time.monotonic() > until:
                    raise RuntimeError("it takes more than 400 s")
                time.sleep(0.1)
        finally:
            for child in children:
                child.kill()
                child.wait()
        if any(child.returncode for child in children):
            raise RuntimeError("".join(log.read_text(errors="replace")[-1500:] for log in logs))
        return [json.loads(Path(folder, f"rank_{r}.json").read_text()) for r in range(WORLD)]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--steps", type=int, nargs="+", default=[3, 3, 1], help="timed ones of each length, odd")
    parser.add_argument("--engines", nargs="+", default=["hf_dist", *PEERS], help=f"of {[*OURS, *PEERS]}")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round that would end later")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        rank(*json.loads(given.one))
    engines = [e for e in given.engines if e != "deepspeed" or find_spec("deepspeed") is not None]
    found: dict[str, list[list[Result]]] = {engine: [] for engine in engines}
    begun = time.monotonic()
    for number in range(given.rounds):
        if (time.monotonic() - begun) * (number + 1) > given.seconds * max(1, number):
            print(f"no time for more than {number} rounds", flush=True)
            break
        for engine in list(found):
            print(f"round {number + 1}: {engine}", file=sys.stderr, flush=True)
            try:
                found[engine].append(run(engine, given.lengths, given.steps))
            except RuntimeError as error:
                del found[engine]
                print(f"{engine} fails: {error}", flush=True)
        report(found, given.lengths, given.steps)


def report(found: dict[str, list[list[Result]]], lengths: list[int], steps: list[int]) -> None:
    """The table of the rounds so far."""
    print(
        "| tokens | engine | ms per 1000 tokens | by ours | processor time by ours | memory | loss, norm off ours by |"
    )
    print("|--:|---|--:|--:|--:|--:|--:|")
    at = 0
    for length, count in zip(lengths, steps, strict=True):
        timed = slice(at + 1, at + 1 + count)
        for engine in found:
            print("|", length, "|", " | ".join([engine, *columns(found, engine, timed, length)]), "|", flush=True)
        at += count + 1


def columns(found: dict[str, list[list[Result]]], engine: str, timed: slice, length: int) -> list[str]:
    """Of an engine at one length."""
    first = next(iter(found))

    def steps(name: str, key: str, of_ranks: Callable[[Any], float]) -> list[list[float]]:
        return [[of_ranks(s) for s in zip(*(r[key][timed] for r in ranks), strict=True)] for ranks in found[name]]

    def by_ours(key: str, of_ranks: Callable[[Any], float]) -> str:
        rounds = zip(steps(engine, key, of_ranks), steps(first, key, of_ranks), strict=False)
        ratios = [statistics.median(a) / statistics.median(b) for a, b in rounds]
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"

    own = [s / length * 1e6 for each in steps(engine, "seconds", max) for s in each]
    peak = statistics.median(max(max(r["peaks"][timed]) for r in ranks) for ranks in found[engine])
    off = [
        max(abs(a - b) / abs(b) for a, b in zip(found[engine][0][0][key], found[first][0][0][key], strict=True))
        for key in ("losses", "norms")
    ]
    differs = " DIFFERS" if max(off) > TOLERANCE else ""
    return [
        f"{statistics.median(own):.0f} ({min(own):.0f} - {max(own):.0f})",
        by_ours("seconds", max),
        by_ours("busy", sum),
        f"{peak / 2**20:.0f} MiB",
        ", ".join(f"{each:.0e}" for each in off) + differs,
    ]


if __name__ == "__main__":
    main()
