"""Figures of `hf_dist/sharding/RESULTS.md` about encoded messages, outside the test run:

python -m tests.sharding.wires.bench_convergence FOLDER [WORD ...]     runs whose name has one of the words; default: all

Two ranks train the model and text of `tests/parallel/local_sgd/bench.py` from its first step. A row: held-out loss at the end,
steps until it is below that of the uncompressed run at step `AIM`, and bytes that a rank sends in a step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.harness import run_ranks
from tests.parallel.local_sgd.bench import LR, ROWS, _rate, model_and_blocks, write_blocks

STEPS, AIM, EVERY = 500, 400, 10
FREEZE = 100
"""Steps before an optimizer sends momentum: DeepSpeed advises 15 to 25% of all."""
ADAM = {"lr": LR, "weight_decay": 0.1, "betas": [0.9, 0.95]}
ZERO_ONE = {**ADAM, "var_freeze_step": FREEZE}
LAMB = {"lr": 1e-2, "weight_decay": 0.01, "betas": [0.9, 0.95], "max_coeff": 1.0}
RUNS: dict[str, dict[str, Any]] = {
    "whole": {},
    "weights int8": {"weights": "int8"},
    "weights fp8_e4m3": {"weights": "fp8_e4m3"},
    "weights int4": {"weights": "int4"},
    "gradients int8": {"gradients": "int8"},
    "gradients fp8_e4m3": {"gradients": "fp8_e4m3"},
    "gradients int4": {"gradients": "int4"},
    "gradients int4, feedback": {"gradients": "int4", "error_feedback": True},
    "gradients int8, feedback": {"gradients": "int8", "error_feedback": True},
    "weights int8, gradients int4": {"weights": "int8", "gradients": "int4"},
    "weights int8, gradients int8": {"weights": "int8", "gradients": "int8"},
    "weights int8, gradients int4, feedback": {"weights": "int8", "gradients": "int4", "error_feedback": True},
    "stage 0, gradients int8": {"stage": 0, "gradients": "int8"},
    "stage 0, gradients int4": {"stage": 0, "gradients": "int4"},
    "stage 0, gradients int4, feedback": {"stage": 0, "gradients": "int4", "error_feedback": True},
    "AdamW of the config": {"stage": 0, "optimizer": {"type": "AdamW", "params": ADAM}},
    "OneBitAdam": {"stage": 0, "optimizer": {"type": "OneBitAdam", "params": {**ADAM, "freeze_step": FREEZE}}},
    "ZeroOneAdam": {"stage": 0, "optimizer": {"type": "ZeroOneAdam", "params": ZERO_ONE}},
    "ZeroOneAdam, var_update_scaler 64": {
        "stage": 0,
        "optimizer": {"type": "ZeroOneAdam", "params": {**ZERO_ONE, "var_update_scaler": 64}},
    },
    "Lamb": {"stage": 0, "optimizer": {"type": "Lamb", "params": LAMB}},
    "OneBitLamb": {"stage": 0, "optimizer": {"type": "OneBitLamb", "params": {**LAMB, "freeze_step": FREEZE}}},
}


def curve(rank: int, world: int, wires: dict[str, Any], folder: str) -> dict[str, Any]:
    """Losses of held-out blocks, and bytes of a step."""
    import hf_dist
    from hf_dist.dist import collectives, comm_counter

    model, train, held_out = model_and_blocks(folder)
    stage = wires.get("stage", 3)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "hf_dist": {"wires": {k: v for k, v in wires.items() if k not in ("stage", "optimizer")}},
    }
    if "optimizer" in wires:
        config["optimizer"] = wires["optimizer"]
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, betas=(0.9, 0.95))
    engine = hf_dist.initialize(
        model,
        config=config,
        optimizer=None if "optimizer" in wires else optimizer,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, _rate),
        device="cpu",
    )
    losses, sent = [], 0
    for step in range(1, STEPS + 1):
        first = ((step - 1) * world + rank) * ROWS % (len(train) - ROWS)
        rows = train[first : first + ROWS]
        with comm_counter.record() as log:
            engine.backward(engine(input_ids=rows, labels=rows).loss)
            engine.step()
        sent = sum(e.nbytes for e in log.entries if e.axis == "shard")
        if step % EVERY == 0:
            mine = held_out[rank::world]
            engine.eval()
            with torch.no_grad():
                loss = engine(input_ids=mine, labels=mine).loss
            engine.train()
            collectives.all_reduce(engine.mesh.world, loss).wait()
            losses.append((step, float(loss)))
    return {"losses": losses, "sent": sent}


def main(folder: Path, words: list[str]) -> None:
    """Run, and print rows of a table."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "blocks.pt").exists():
        write_blocks(folder)
    file = folder / "wires.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name, wires in RUNS.items():
        if name in found or (words and name != "whole" and not any(word in name for word in words)):
            continue
        found[name] = run_ranks(curve, 2, (wires, str(folder)), timeout=1800)[0]
        file.write_text(json.dumps(found))
    aim = dict(map(tuple, found["whole"]["losses"]))[AIM]
    print(f"| {'sent':40} | loss at {STEPS} | steps to {aim:.4f} | bytes per step |")
    for name, result in found.items():
        reached = next((step for step, loss in result["losses"] if loss <= aim), None)
        print(f"| {name:40} | {result['losses'][-1][1]:.4f} | {reached or 'not reached'} | {result['sent']:,} |")


if __name__ == "__main__":
    from tests.tools.proofs import start_fork_server

    start_fork_server()
    main(Path(sys.argv[1]), sys.argv[2:])
