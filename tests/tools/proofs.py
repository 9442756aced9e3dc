"""What a check is asked for: a folder with a tiny model and a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_dist.tools.check import Asked
from tests.harness import run_ranks
from tests.parity.families import make_model


def start_fork_server() -> None:
    """With everything loaded: a check starts it with less, and each rank would import the rest."""
    run_ranks(_nothing, 1)


def _nothing(rank: int, world: int) -> None:
    """Of a job that only starts the server."""


def asked_for(folder: Path, family: str, config: dict[str, Any], *, layers: int = 3, **options: Any) -> Asked:
    """A model of that family and a config in `folder`. `layers`: of a mixture. "qwen3_moe, routers": with their loss."""
    name, _, routers = family.partition(", ")
    model: Any = make_model(name, layers=layers)
    if routers:
        model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.1
    model.save_pretrained(folder / "tiny")
    (folder / "ds.json").write_text(json.dumps(config))
    return Asked(str(folder / "tiny"), folder / "ds.json", **{"world": 2, "steps": 2, "seq": 12, **options})
