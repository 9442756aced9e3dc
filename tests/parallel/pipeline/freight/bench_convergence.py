"""Figures of `hf_dist/parallel/pipeline/RESULTS.md`, "Encoded hidden states", outside the test run:

python -m tests.parallel.pipeline.freight.bench_convergence FOLDER

The model, the text, the beginning and the number of tokens are those of `tests/parallel/local_sgd/bench.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.harness import run_ranks
from tests.parallel.local_sgd.bench import BEGINNING, LR, ROWS, STEPS, _rate, curve, model_and_blocks, write_blocks

MICROBATCHES = 4
RUNS: dict[str, dict[str, Any]] = {
    "as they are": {},
    **{codec: {"stages": codec, "block": 64} for codec in ("int8", "fp8_e4m3", "int4")},
}


def staged(rank: int, world: int, wires: dict[str, Any], folder: str) -> tuple[float, int]:
    """Loss of held-out blocks after the last step, and bytes that this rank sent to the other stage."""
    import hf_dist

    model, train, held_out = model_and_blocks(folder)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": 1.0,
        "pipeline": {"stages": 2},
        "hf_dist": {"wires": wires},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, betas=(0.9, 0.95))
    rows = train[:ROWS]
    engine = hf_dist.initialize(
        model,
        config=config,
        optimizer=optimizer,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, _rate),
        device="cpu",
        example_batch={"input_ids": rows, "labels": rows},
    )
    engine.load_checkpoint(f"{folder}/beginning")
    assert engine.pipeline is not None
    for step in range(BEGINNING + 1, STEPS + 1):
        firsts = [((step - 1) * MICROBATCHES + m) * ROWS % (len(train) - ROWS) for m in range(MICROBATCHES)]
        engine.train_batch(iter([{"input_ids": train[f : f + ROWS], "labels": train[f : f + ROWS]} for f in firsts]))
    sent = engine.pipeline.transport.sent_nbytes
    parts = held_out.chunk(MICROBATCHES)
    return float(engine.eval_batch(iter([{"input_ids": p, "labels": p} for p in parts]))), sent


def main(folder: Path) -> None:
    """Run all, print one line for each."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "beginning").exists():
        write_blocks(folder)
        run_ranks(curve, 4, ({}, str(folder), True), timeout=1200)
    for name, wires in RUNS.items():
        loss, sent = run_ranks(staged, 2, (wires, str(folder)), timeout=1200)[0]
        print(f"{name}: {loss:.4f}, {sent} bytes", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
