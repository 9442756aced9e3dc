"""Weights that are frozen, loaded in fp32 and used in bf16: what rests of them and what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import hf_dist
from hf_dist.memory.offload.resting import Tier
from hf_dist.planning.optimizer_states import OptimizerStates
from hf_dist.planning.state_bytes import States
from tests.covering import FULL_GRID
from tests.window.nets import Blocks, batch, config, loss_of

STAGES = (0, 1, 3) if FULL_GRID else (1, 3)


def engine_of(stage: int, seed: int = 0) -> Any:
    """The first layer and one matrix of a block are frozen."""
    model = Blocks(seed)
    for p in (*model.first.parameters(), model.blocks[1][0].weight):
        p.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return hf_dist.initialize(model, config=config(stage, bf16={"enabled": True}), optimizer=optimizer)


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the model files."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def on_ranks(rank: int, world: int, root: str) -> dict[int, Any]:
    """By stage: frozen weights in the checkpoint, in the model after another one loaded it, bytes held and planned."""
    found: dict[int, Any] = {}
    for stage in STAGES:
        engine = engine_of(stage)
        frozen = [name for name, p in engine.model.named_parameters() if not p.requires_grad]
        for i in range(2):
            engine.backward(loss_of(engine.model, batch(i)))
            engine.step()
        folder = Path(root) / str(stage)
        engine.save_checkpoint(folder)
        states = States.of_engine(
            engine.sharded, engine.config, OptimizerStates.of_attached(engine.fragments, engine.config)
        )
        planned = states.nbytes.weights[Tier.DEVICE] + states.nbytes.masters[Tier.DEVICE]
        held = engine.sharded.resident_nbytes()[Tier.DEVICE]
        again = engine_of((stage + 1) % 4, seed=1)
        again.load_checkpoint(folder)
        with hf_dist.gathered(again.model):
            live = {name: dict(again.model.named_parameters())[name].detach().clone() for name in frozen}
        again.save_checkpoint(folder.with_suffix(".again"))
        found[stage] = saved(folder), live, saved(folder.with_suffix(".again")), (held, planned)
    return found
