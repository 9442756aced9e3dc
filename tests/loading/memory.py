"""Host memory per rank while a model is loaded and sharded.

    python -m tests.loading.memory [--ranks 4] [--hidden 1280] [--stock]

Writes a llama checkpoint to a temporary folder, loads it at ZeRO stage 3 on several ranks and prints, for each dtype, the
peak of resident memory (anonymous and file pages) above what the process had after imports and process groups, and its
ratio to the shard. `--stock` loads with the stock `from_pretrained` instead.
"""

from __future__ import annotations

import argparse
import gc
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers as tf

import hf_dist
from hf_dist.checkpoint.safetensors_source import bytes_read
from hf_dist.config import load_config
from hf_dist.engine.build import mesh_for
from tests.harness import run_ranks

MIB = 2**20


def write_llama(folder: Path, hidden: int, dtype: torch.dtype) -> Path:
    """A llama of about 21 blocks whose size is set by `hidden` (1280: 500M parameters), in files of at most 400 MB."""
    config = tf.LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 3, num_hidden_layers=21, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64, vocab_size=25 * hidden,
    )  # fmt: skip
    with torch.device("meta"):  # drawing so many numbers takes longer than reading them
        model = tf.LlamaForCausalLM(config).to(dtype)
    model.to_empty(device="cpu")
    for p in model.parameters():
        p.data.fill_(0.5)
    model.save_pretrained(folder, max_shard_size="400MB")
    return folder


def resident(field: str) -> int:
    """Bytes: VmRSS (now) or VmHWM (peak since the last reset)."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    assert found
    return int(found[1]) * 1024


def measure(rank: int, world: int, path: Path, dtype: str, stock: bool) -> dict[str, Any]:
    """Peak of this rank above its base, its shard, the largest tensor and the file bytes it read, in bytes."""
    compute = {"bf16": {"enabled": True}} if dtype == "bfloat16" else {}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, **compute}
    mesh_for(load_config(config))
    # What `from_pretrained` imports when it is first called belongs to the base.
    hf_dist.from_pretrained(tf.AutoModelForCausalLM, path / "tiny")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    base = resident("VmRSS")
    wanted = getattr(torch, dtype)
    before = bytes_read()
    if stock:
        model = tf.AutoModelForCausalLM.from_pretrained(path, dtype=wanted)
    else:
        model = hf_dist.from_pretrained(tf.AutoModelForCausalLM, path, dtype=wanted)
    engine = hf_dist.initialize(model, config=config)
    return {
        "peak": resident("VmHWM") - base,
        "shard": sum(g.source.nbytes for g in engine.sharded.groups),
        "largest": max(p.numel() * p.element_size() for p in model.parameters()),
        "read": bytes_read() - before,
        "stored": sum(f.stat().st_size for f in path.glob("*.safetensors")),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def run(hidden: int, ranks: int, dtype: str, stock: bool = False) -> list[dict[str, Any]]:
    """What each rank measured."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_llama(Path(folder), hidden, getattr(torch, dtype))
        write_llama(path / "tiny", 64, torch.float32)
        return run_ranks(measure, ranks, (path, dtype, stock))


def main() -> None:
    """Print one line per dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1280)
    parser.add_argument("--stock", action="store_true")
    args = parser.parse_args()
    for dtype in ("bfloat16", "float32"):
        results = run(args.hidden, args.ranks, dtype, args.stock)
        worst = max(results, key=lambda r: r["peak"])
        limit = 1.3 * worst["shard"] + worst["largest"]
        print(
            f"\n{dtype}: {worst['parameters'] / 1e6:.0f}M parameters, {args.ranks} ranks: peak {worst['peak'] / MIB:.0f} MiB = "
            f"{worst['peak'] / worst['shard']:.2f} x shard ({worst['shard'] / MIB:.0f} MiB), limit {limit / MIB:.0f} MiB; "
            f"read {max(r['read'] for r in results) * args.ranks / worst['stored']:.3f} x share",
            flush=True,
        )


if __name__ == "__main__":
    main()
