"""The planned peak of a training step beside the measured one, in bytes of tensors.

    python -m tests.estimate_peak [--models small medium large] [--stages 0 1 2 3] [--only SUBSTRING] [--in-backward]
                                  [--multiply]

Two ranks over gloo (one for the large model at stage 0), bf16, HF Llamas of 26M, 124M and 498M parameters. Every operation of
the second step is followed by a sum over all storages that are alive: temporary tensors count, and the memory that kernels
take inside does not, as with `torch.cuda.max_memory_allocated`. Host and device are one memory here: both sides add them up.
Sizes do not depend on values: matrix products give zeros unless `--multiply` is said (a CPU without bf16 instructions needs
minutes for a step of the smallest model).
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.harness import run_ranks

aten = torch.ops.aten
RANKS = 2
MODELS: dict[str, tuple[int, int, int, int, int, int, int]] = {  # width, layers, heads, inner, vocabulary; tokens, rows
    "small": (512, 6, 8, 1408, 6144, 256, 4),
    "medium": (768, 12, 12, 2048, 25600, 256, 2),
    "large": (1280, 21, 20, 3456, 32000, 128, 1),
}
OFFLOADS: dict[str, dict[str, Any]] = {
    "": {},
    "optimizer": {"offload_optimizer": {"device": "cpu"}},
    "optimizer+weights": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
Case = tuple[str, int, str, bool, int]
"""Model, ZeRO stage, offload, activation checkpointing, microbatches."""


def cases(models: list[str], stages: list[int]) -> list[Case]:
    """Every stage with each offload that it has, with and without checkpointing and accumulation."""
    return [
        (model, stage, offload, checkpointing, microbatches)
        for model in models
        for stage in stages
        for offload in OFFLOADS
        if stage >= {"": 0, "optimizer": 1, "optimizer+weights": 3}[offload]
        for checkpointing in (False, True)
        for microbatches in (1, 2)
    ]


def config_of(case: Case, in_backward: bool = False) -> dict[str, Any]:
    """Its JSON."""
    model, stage, offload, checkpointing, microbatches = case
    return {
        "train_micro_batch_size_per_gpu": MODELS[model][-1],
        "gradient_accumulation_steps": microbatches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage, **OFFLOADS[offload]},
        "bf16": {"enabled": True},
        **({"activation_checkpointing": {"every_n_layers": 1}} if checkpointing else {}),
        **({"hf_dist": {"optimizer_in_backward": True}, "gradient_clipping": 0} if in_backward else {}),
    }


def name_of(case: Case) -> str:
    """For people."""
    model, stage, offload, checkpointing, microbatches = case
    kept = "checkpointed" if checkpointing else "-"
    return f"{model:7} stage {stage} {offload or '-':18} {kept:13}{microbatches} microbatches"


def llama(name: str) -> Any:
    """An HF model of one of the sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, heads, inner, vocabulary, *_ = MODELS[name]
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, intermediate_size=inner, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def product_of(func: Any, args: Any) -> Any:
    """Zeros of the shape of a matrix product, or None for an operation that is none."""
    if func in (aten.mm.default, aten.bmm.default):
        return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[-1])
    if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
        query = args[0]
        return torch.zeros_like(query), query.new_zeros(query.shape[:-1], dtype=torch.float32)
    if func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return tuple(torch.zeros_like(given) for given in args[1:4])
    return None


class Peak(TorchDispatchMode):
    """Bytes of the storages alive after each operation, at most."""

    def __init__(self, multiply: bool = False) -> None:
        super().__init__()
        self.multiply = multiply
        self.nbytes = 0
        self._alive: dict[int, StorageWeakRef] = {}
        for thing in gc.get_objects():
            if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
                self._see(thing)

    def _see(self, tensor: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # freed weights may not be read, but they may be looked at
            storage = tensor.untyped_storage()
        if storage._cdata not in self._alive:
            self._alive[storage._cdata] = StorageWeakRef(storage)

    def now(self) -> int:
        """Bytes alive."""
        total = 0
        for key, reference in list(self._alive.items()):
            if reference.expired():
                del self._alive[key]
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._alive[key]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, then look."""
        out = None if self.multiply else product_of(func, args)
        if out is None:
            out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._see(leaf)
        self.nbytes = max(self.nbytes, self.now())
        return out


def measure(rank: int, world: int, chosen: list[Case], in_backward: bool, multiply: bool) -> list[tuple[int, int]]:
    """By case: (measured, planned) peak of this rank, device and host together."""
    import hf_dist
    from hf_dist.config import load_config, resolve_without_trainer
    from hf_dist.planning.planner import Planner, Workload

    found = []
    for case in chosen:
        width, *_, vocabulary, seq, rows = MODELS[case[0]]
        with torch.device("meta"):
            meta = llama(case[0])
        config = resolve_without_trainer(load_config(config_of(case, in_backward)), hidden_size=width)
        plan = Planner(meta, world, Workload(rows, seq)).plan(config)
        gc.collect()
        before = Peak().now()
        model = llama(case[0])
        engine = hf_dist.initialize(model, config=config_of(case, in_backward), device="cpu")
        for _step in range(2):
            tracked = Peak(multiply)  # of the second step: the first one makes what stays
            for _ in range(case[-1]):
                ids = torch.randint(vocabulary, (rows, seq))
                with tracked:
                    engine.backward(engine(input_ids=ids, labels=ids).loss)
                    engine.step()
            peak = tracked.nbytes - before
        found.append((peak, plan.device_peak + plan.host))
        del model, engine, tracked
        gc.collect()
    return found


def main() -> None:
    """Print one line per case: the rank whose measured peak is farthest from the plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["small", "medium"], choices=MODELS)
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--only", default="")
    parser.add_argument("--in-backward", action="store_true", help="the optimizer steps inside of backward")
    parser.add_argument("--multiply", action="store_true", help="compute matrix products")
    arguments = parser.parse_args()
    chosen = [case for case in cases(arguments.models, arguments.stages) if arguments.only in name_of(case)]
    worst = 0.0
    for kind in sorted({case[:3] for case in chosen}):  # what is printed is not lost
        some = [case for case in chosen if case[:3] == kind]
        given = (some, arguments.in_backward, arguments.multiply)
        by_rank = run_ranks(measure, 1 if kind[:2] == ("large", 0) else RANKS, given, timeout=3000)
        for case, *ranks in zip(some, *by_rank, strict=False):
            peak, planned = max(ranks)
            worst = max(worst, abs(peak / planned - 1))
            print(
                f"{name_of(case)}  measured {peak / 1e6:7.1f} MB  planned {planned / 1e6:7.1f} MB  ratio {peak / planned:.3f}",
                flush=True,
            )
    print(f"farthest from the plan: {worst:.1%}")


if __name__ == "__main__":
    main()
