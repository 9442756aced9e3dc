"""Save at one layout, load at another: states and losses, on ranks."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch

from tests.covering import FULL_GRID
from tests.parity.families import make_batches, make_model, param_groups, summed_loss

ROWS = 36
BEFORE, AFTER = 3, 10 if FULL_GRID else 5


COPIES: dict[str, tuple[int, str]] = {
    "copies": (3, "shard"),
    **{f"over{stage}": (stage, "all") for stage in (1, 2, 3)},
}
"""Layouts with two copies of the shards: name -> (stage, `hf_dist.optimizer_over`)."""
Layout = int | str
"""A stage, or one of `COPIES`."""


def start(
    layout: Layout, *, precision: str = "fp32", accumulation: int = 1, family: str = "llama", seed: int = 0
) -> Any:
    """An engine on a model whose weights depend on `seed`, so that a load that does nothing is seen."""
    import hf_dist

    model = make_model(family)
    if seed:
        torch.manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(std=0.1)
    config: dict[str, Any] = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": layout},
    }
    if isinstance(layout, str):
        stage, over = COPIES[layout]
        config["zero_optimization"] = {"stage": stage, "mics_shard_size": int(os.environ["WORLD_SIZE"]) // 2}
        config["hf_dist"] = {"optimizer_over": over}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    optimizer = torch.optim.AdamW(param_groups(model), lr=3e-3, eps=1e-3, foreach=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
    return hf_dist.initialize(model, config=config, optimizer=optimizer, lr_scheduler=schedule)


def train(engine: Any, first: int, count: int) -> list[float]:
    """Global losses of steps [first, first + count) of the common data order."""
    from hf_dist.dist import collectives

    rank, world, accumulation = engine.mesh.dp.rank, engine.mesh.dp.size, engine.batch.accumulation
    micro = ROWS // (world * accumulation)
    losses = []
    for batch in make_batches("llama", first + count)[first:]:
        mine = torch.zeros(2)
        for k in range(accumulation):
            begin = (k * world + rank) * micro
            rows = {key: value[begin : begin + micro] for key, value in batch.items()}
            total, items = summed_loss(engine.model, rows)
            everyone = torch.tensor(float(batch_items(batch)))
            engine.backward(total * world / everyone, scale_wrt_gas=False)
            engine.step()
            mine += torch.tensor([total.item(), float(items)])
        collectives.all_reduce(engine.mesh.dp, mine, op="sum").wait()
        losses.append((mine[0] / mine[1]).item())
    return losses


def batch_items(batch: dict[str, torch.Tensor]) -> int:
    """Labels that count, over all rows; the first position predicts nothing."""
    return int((batch["labels"][:, 1:] != -100).sum())


def digests(engine: Any) -> dict[str, str]:
    """Hash of every master weight and optimizer state, whole, the same in every layout. Collective."""
    from hf_dist.checkpoint.flat_slice import FlatSlice
    from hf_dist.checkpoint.training_state import owned_parts, saved_state
    from hf_dist.dist import collectives

    mine = {}
    for name, value in saved_state(engine, list(owned_parts(engine.sharded, _as_is)), _as_is).items():
        if isinstance(value, FlatSlice):
            mine[name] = (value.start, value.values.clone())
        else:
            mine[name] = (0, value.reshape(-1).clone())
    whole: dict[str, list[Any]] = {}
    for part in collectives.all_gather_object(engine.mesh.dp, mine):
        for name, piece in part.items():
            whole.setdefault(name, []).append(piece)
    return {
        name: hashlib.sha256(
            torch.cat([v for _, v in sorted(pieces, key=lambda p: p[0])]).numpy().tobytes()
        ).hexdigest()
        for name, pieces in whole.items()
    }


def _as_is(_: str, value: torch.Tensor) -> torch.Tensor:
    return value.detach()


def save_all(rank: int, world: int, root: str, layouts: tuple[Layout, ...], **options: Any) -> dict[Layout, Any]:
    """Train, save, go on: digests at the save and losses after it, by layout."""
    results = {}
    for layout in layouts:
        engine = start(layout, **options)
        train(engine, 0, BEFORE)
        engine.save_checkpoint(Path(root) / f"w{world}-z{layout}")
        results[layout] = (digests(engine), train(engine, BEFORE, AFTER))
    return results


def load_all(rank: int, world: int, pairs: list[tuple[str, Layout, int]], **options: Any) -> Any:
    """For every (folder, layout, steps): digests after the load, losses of the next steps, this rank's next random number."""
    results = {}
    for folder, layout, steps in pairs:
        engine = start(layout, seed=7, **options)
        engine.load_checkpoint(folder)
        drawn = float(torch.rand(()))
        results[folder, layout] = (digests(engine), train(engine, BEFORE, steps), drawn)
    return results
