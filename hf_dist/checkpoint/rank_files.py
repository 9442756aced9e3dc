"""Training state for a resume on the same layout: one file per rank, tensors and plain values only.

Nothing untrusted is unpickled (`weights_only=True`). A file written by another number of ranks, ZeRO stage or precision is
refused by name; the weights themselves are always in the folder as an HF model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from hf_dist import collectives
from hf_dist.errors import CheckpointError
from hf_dist.mesh import ParallelMesh
from hf_dist.sharding.runtime import ShardedModel

FOLDER = "hf_dist_state"


class Stateful(Protocol):
    """What is saved: the engine."""

    sharded: ShardedModel

    @property
    def mesh(self) -> ParallelMesh:
        """Axes and ranks."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's state."""

    def load_state_dict(self, state: dict[str, Any], weights_only: bool = False) -> None:
        """Restore it."""


def layout_facts(engine: Stateful) -> dict[str, Any]:
    """What must be equal for per-rank files to fit."""
    sharded, mesh = engine.sharded, engine.mesh
    return {
        "data-parallel ranks": mesh.dp.size,
        "ranks per shard group": mesh.dp_shard.size,
        "optimizer state": sharded.placements.optim.value,
        "weights": sharded.placements.params.value,
        "compute dtype": str(sharded.precision.compute),
        "parameters": [[s.name, list(s.shape)] for g in sharded.groups for s in g.layout.slots],
    }


def _file(folder: Path, mesh: ParallelMesh) -> Path:
    return folder / f"rank_{mesh.dp.rank:05d}_of_{mesh.dp.size:05d}.pt"


def save(engine: Stateful, directory: str | os.PathLike[str]) -> None:
    """Write this rank's file under a temporary name, then rename it. Every rank calls it; returns when all are done."""
    folder = Path(directory) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    final = _file(folder, engine.mesh)
    part = final.with_suffix(".partial")
    torch.save({"layout": layout_facts(engine), "state": engine.state_dict()}, part)
    os.replace(part, final)
    collectives.barrier(engine.mesh.dp)


def load(engine: Stateful, directory: str | os.PathLike[str], weights_only: bool = False) -> None:
    """Read this rank's file; with `weights_only` optimizer, scaler and counters stay as they are.

    Every rank calls it. Raises `CheckpointError` naming what is missing or differs.
    """
    folder = Path(directory) / FOLDER
    path = _file(folder, engine.mesh)
    problem, saved = _read(path, layout_facts(engine))
    everyone = collectives.all_gather_object(engine.mesh.dp, problem)
    first = next((p for p in everyone if p), None)
    if first is not None or saved is None:
        raise CheckpointError(first or f"{path} could not be read")
    engine.load_state_dict(saved["state"], weights_only)


def exists(directory: str | os.PathLike[str]) -> bool:
    """Whether `directory` holds training state of hf_dist."""
    return (Path(directory) / FOLDER).is_dir()


def _read(path: Path, expected: Mapping[str, Any]) -> tuple[str | None, dict[str, Any] | None]:
    if not path.exists():
        found = sorted(p.name for p in path.parent.glob("rank_*.pt"))
        have = f"it holds {len(found)} files such as {found[0]}" if found else "it holds no training state"
        return (
            f"{path} is missing: {have}. Resume with the number of ranks that saved it, or start from its weights with "
            f"from_pretrained({str(path.parent.parent)!r})."
        ), None
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (
        Exception
    ) as error:  # torch, zipfile and pickle have their own; raised here it would leave the other ranks waiting
        return (
            f"{path} cannot be read ({type(error).__name__}: {str(error).splitlines()[0]}). Resume from an older checkpoint, "
            f"or start from its weights with from_pretrained({str(path.parent.parent)!r})."
        ), None
    for key, value in expected.items():
        was = saved["layout"].get(key)
        if was != value:
            detail = "" if isinstance(value, list) else f" ({was} there, {value} now)"
            return (
                f"{path} was saved with another layout: {key} differ{detail}. Resume with the same settings, or start from "
                f"its weights with from_pretrained({str(path.parent.parent)!r})."
            ), None
    return None, saved
