"""A Llama of about 1.2B parameters on one GPU: hf_dist at stages 0 and 3 and with its optimizer on the host, beside torch's
DDP, FSDP2 and accelerate's FSDP2. `hf-dist bench` takes turns; here its rows get the model's flops utilisation.

    python -m tests.gpu.speed          on a CPU a rehearsal with next to nothing, whose figures mean nothing
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.gpu.place import GPUS
from tests.gpu.results import record, table

WIDE = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
}
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
SIZES, VOCABULARY, SEQ, ROWS, STEPS = (WIDE, 32000, 2048, 4, 8) if GPUS else (SMALL, 101, 16, 2, 2)
ENGINES = "hf_dist,ddp,fsdp2,accelerate_fsdp2"
HOST = {"device": "cpu", "pin_memory": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero3": {"stage": 3},
    "zero2_host": {"stage": 2, "offload_optimizer": HOST},
}
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bf16 operations a second, by a word in the GPU's name (NVIDIA's data sheets)."""


def flops_per_token() -> float:
    """Forward and backward: six for each weight of a product, and attention's scores (PaLM, arXiv 2204.02311, appendix B)."""
    hidden, layers, inner = SIZES["hidden_size"], SIZES["num_hidden_layers"], SIZES["intermediate_size"]
    keys = SIZES["num_key_value_heads"] / SIZES["num_attention_heads"]
    weights = layers * (hidden * hidden * (2 + 2 * keys) + 3 * hidden * inner) + hidden * VOCABULARY
    return 6 * weights + 12 * layers * hidden * SEQ / 2


def main() -> None:
    """Run the benchmark, print its rows and keep them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        torch.manual_seed(0)
        config = LlamaConfig(**SIZES, vocab_size=VOCABULARY, use_cache=False)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
        for name, zero in CONFIGS.items():
            data = {"bf16": {"enabled": True}, "gradient_clipping": 1.0, "zero_optimization": zero}
            (folder / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")
        files = [str(folder / f"{name}.json") for name in CONFIGS]
        asked = [
            "--model",
            str(folder / "model"),
            "--config",
            *files,
            "--engines",
            ENGINES,
            "--ranks",
            "1",
            "--dtype",
            "bf16",
        ]
        sizes = ["--seq", str(SEQ), "--micro-batch", str(ROWS), "--steps", str(STEPS), "--rounds", "2" if GPUS else "1"]
        command = [sys.executable, "-m", "hf_dist.tools.cli", "bench", *asked, *sizes, "--output", str(folder / "out")]
        code = subprocess.run(command, env=dict(os.environ)).returncode
        found = json.loads((folder / "out" / "bench.json").read_text(encoding="utf-8")) if code == 0 else {"rows": []}
    name = torch.cuda.get_device_name(0) if GPUS else ""
    peak = next((flops for word, flops in PEAKS.items() if word in name), None)
    rows = []
    for row in found["rows"]:
        speed = row["speed"][1]
        used = f"{speed * flops_per_token() / peak:.3f}" if peak else ""
        said = row["error"] or f"{speed:,.0f}"
        rows.append(
            {"engine": row["name"], "tokens/s": said, "MFU": used, "peak GB": f"{row['peak_nbytes'] / 1e9:.2f}"}
        )
        record("speed", rows[-1])
    if rows:
        print("\n".join(table(tuple(rows[0]), [tuple(row.values()) for row in rows])))
    sys.exit(code or not rows)


if __name__ == "__main__":
    main()
