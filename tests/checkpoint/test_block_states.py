"""States that an optimizer keeps for blocks of a fragment, as 8-bit ones do: refused by name at the first save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.checkpoint.grid import ROWS, train
from tests.harness import run_ranks
from tests.parity.families import make_model

BLOCK = 64


class Tabled(torch.optim.AdamW):
    """Beside its moments a table that is the same for all parameters, and a value for each parameter that says so."""

    def step(self, closure: Any = None) -> Any:
        value = super().step(closure)
        for p, state in self.state.items():
            state.setdefault("qmap", torch.linspace(-1, 1, 255))
            state.setdefault("one", torch.full((1,), float(p.numel())))
        return value


class Blockwise(Tabled):
    """And a scale for every 64 elements of large parameters: only a rank that holds many elements of one has them."""

    least = 0

    def step(self, closure: Any = None) -> Any:
        value = super().step(closure)
        for p, state in self.state.items():
            if p.numel() > self.least:
                state["absmax1"] = state["exp_avg"].split(BLOCK)[0].abs().max().repeat(-(-p.numel() // BLOCK))
        return value


def save(rank: int, world: int, root: str, kind: type[Tabled]) -> str:
    """The error of the first save, and what it left; "" if it was written."""
    import hf_dist
    from hf_dist.errors import CheckpointError

    model = make_model("llama")
    config = {"train_batch_size": ROWS, "zero_optimization": {"stage": 2}}
    optimizer = kind(model.parameters(), lr=1e-3)
    if isinstance(optimizer, Blockwise):
        optimizer.least = 0 if rank else 10**9
    engine = hf_dist.initialize(model, config=config, optimizer=optimizer)
    train(engine, 0, 1)
    try:
        engine.save_checkpoint(Path(root) / "checkpoint-1")
    except CheckpointError as error:
        return f"{error} {[p.name for p in Path(root).iterdir()]}"
    return ""


def test_scales_of_blocks_are_refused_by_name_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(save, 2, (str(tmp_path), Blockwise), timeout=120)
    assert first == second
    assert "rank 1: Blockwise keeps a state 'absmax1' of" in first and " values for lm_head.weight" in first
    assert first.endswith("[]"), "nothing is left of it"


def test_tables_that_all_parameters_share_and_single_values_are_saved(tmp_path: Path) -> None:
    assert run_ranks(save, 2, (str(tmp_path), Tabled), timeout=120) == ["", ""]
