"""Describes a checkpoint folder of hf_dist or another tool, and whether it is complete. Reads headers and small files only."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_dist.checkpoint import dcp, folder
from hf_dist.checkpoint.safetensors_header import files_of_index, read_header
from hf_dist.errors import CheckpointError

__all__ = ["FOREIGN_WEIGHTS", "Description", "describe", "is_training_file"]

FOREIGN_WEIGHTS = (
    ("global_step*/zero_pp_rank_*", "DeepSpeed shards: run its zero_to_fp32.py with --safe_serialization first."),
    ("global_step*/*model_states.pt", "DeepSpeed shards: run its zero_to_fp32.py with --safe_serialization first."),
    ("*/*model_states.pt", "DeepSpeed shards: run its zero_to_fp32.py with --safe_serialization first."),
    ("zero_pp_rank_*", "DeepSpeed shards: name the folder above it, after zero_to_fp32.py --safe_serialization."),
    ("pytorch_model_fsdp_0/*", "FSDP shards: run `accelerate merge-weights pytorch_model_fsdp_0 OUT` first."),
    ("pytorch_model*.bin", "A pickled pytorch_model.bin: load it once with from_pretrained and save_pretrained."),
)
"""(pattern below the folder, advice to the user)."""
_TRAINING = re.compile(
    r"hf_dist.*\.json|\.write-probe|trainer_state\.json|training_args\.bin|optimizer.*\.(pt|bin)|scheduler\.pt|scaler\.pt"
    r"|rng_state.*\.pth|random_states_.*\.pkl|latest(_universal)?|zero_to_fp32\.py|events\.out\..*|pytorch_model.*\.bin"
)
# First match wins, because a DeepSpeed or FSDP checkpoint of the Trainer also has a trainer state.
_KINDS = (
    (f"{folder.MANIFEST}", "hf_dist"),
    ("zero/*/fp32.pt", "DeepSpeed (universal)"),
    ("*/zero/*/fp32.pt", "DeepSpeed (universal)"),
    ("zero_pp_rank_*", "DeepSpeed"),
    ("*/zero_pp_rank_*", "DeepSpeed"),
    ("*/mp_rank_*", "DeepSpeed"),
    ("pytorch_model_fsdp*", "FSDP (accelerate)"),
    ("trainer_state.json", "stock Trainer"),
    (".metadata", "torch.distributed.checkpoint"),
    ("adapter_config.json", "PEFT adapter"),
    ("config.json", "Hugging Face model"),
)
_RUN = "output folder of a run"


@dataclass(frozen=True)
class Description:
    """What `hf-dist inspect` prints."""

    path: str
    kind: str
    """hf_dist, stock Trainer, DeepSpeed, FSDP (accelerate), Hugging Face model, ... or unknown."""
    problems: tuple[str, ...] = ()
    """Why the folder is not complete; empty if it is, as far as its kind allows to check."""
    step: int | None = None
    hf_dist: str | None = None
    """Version that wrote it."""
    layout: Mapping[str, object] = field(default_factory=dict)
    """Ranks, ZeRO stage, precision and batch of the run that saved it."""
    weights: Mapping[str, Any] = field(default_factory=dict)
    """Files, tensors, elements, bytes, and elements by dtype of the safetensors files."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Parameters, elements, bytes and optimizer states of the training state, without values of single ranks."""
    files: Mapping[str, int] = field(default_factory=dict)
    """Every file with its bytes, without those of `checkpoints`."""
    checkpoints: tuple[Mapping[str, Any], ...] = ()
    """Of a run's output folder, by step: name, step, complete, bytes."""

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self.problems

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {**asdict(self), "complete": self.complete}


def is_training_file(name: str) -> bool:
    """Whether a file beside the weights belongs to the training state, not to the model."""
    return _TRAINING.fullmatch(name) is not None


def describe(path: Path) -> Description:
    """Describe a folder. Raises `CheckpointError` if there is none."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder")
    inside = folder.numbered(path)
    found = [p for p in sorted(path.rglob("*")) if p.is_file() and not any(c in p.parents for c in inside)]
    files = {str(p.relative_to(path)): p.stat().st_size for p in found}
    kind = next((kind for pattern, kind in _KINDS if any(path.glob(pattern))), "unknown")
    if inside and not (path / folder.MANIFEST).is_file():
        kind = _RUN
    problems: list[str] = []
    manifest: Mapping[str, Any] = {}
    if kind == "hf_dist":
        try:
            manifest = folder.read_manifest(path) or {}
            problems += folder.incomplete(path)
        except CheckpointError as error:
            problems.append(str(error))
    elif (path / folder.STATE).is_dir() or path.name.startswith("."):
        kind = "hf_dist"
        problems.append(f"no {folder.MANIFEST}: the save did not finish")
    elif kind == "unknown":
        problems.append("nothing that is known here: no model, no training state")
    weights = _weights(path, [p for p in found if p.suffix == ".safetensors"], problems)
    state = _state(path / folder.STATE, problems) if (path / folder.STATE).is_dir() else {}
    return Description(
        path=str(path),
        kind=kind,
        problems=tuple(problems),
        step=manifest.get("step", _trainer_step(path)),
        hf_dist=manifest.get("hf_dist"),
        layout=manifest.get("layout", {}),
        weights=weights,
        state=state,
        files=files,
        checkpoints=tuple(_checkpoint(p) for p in sorted(inside, key=lambda p: int(re.split("[-_]", p.name)[-1]))),
    )


def _checkpoint(path: Path) -> dict[str, object]:
    try:
        stock = (path / folder.TRAINER_STATE).is_file() and not (path / folder.MANIFEST).exists()
        complete = stock or not folder.incomplete(path)
    except CheckpointError:
        complete = False
    nbytes = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    return {"name": path.name, "step": int(re.split("[-_]", path.name)[-1]), "complete": complete, "bytes": nbytes}


def _trainer_step(path: Path) -> int | None:
    try:
        step = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def _weights(path: Path, found: list[Path], problems: list[str]) -> dict[str, object]:
    numel: dict[str, int] = {}
    tensors = 0
    files = [p for p in found if folder.STATE not in p.relative_to(path).parts]
    for file in files:
        try:
            header = read_header(file).tensors
        except CheckpointError as error:
            problems.append(str(error))
            continue
        tensors += len(header)
        for entry in header.values():
            numel[entry["dtype"]] = numel.get(entry["dtype"], 0) + math.prod(entry["shape"])
    problems += _missing_from_index(path)
    if not files:
        return {}
    nbytes = sum(file.stat().st_size for file in files)
    return {
        "files": len(files), "tensors": tensors, "parameters": sum(numel.values()), "bytes": nbytes, "by_dtype": numel
    }  # fmt: skip


def _missing_from_index(path: Path) -> list[str]:
    problems = []
    for index in sorted(path.glob("*.index.json")):
        try:
            named = files_of_index(index)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        problems += [
            f"{name} is named in {index.name} and missing" for name in sorted(named) if not (path / name).is_file()
        ]
    return problems


def _state(path: Path, problems: list[str]) -> dict[str, object]:
    try:
        stored = dcp.stored_tensors(path)
    except CheckpointError as error:
        problems.append(str(error))
        return {}
    masters = [shape for name, (shape, _) in stored.items() if name.startswith("weights.")]
    optimizer = sorted({name.split(".")[1] for name in stored if name.startswith(("optimizer.", "optimizer_scalar."))})
    nbytes = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    numel = sum(map(math.prod, masters))
    return {"master_weights": len(masters), "elements": numel, "optimizer_states": optimizer, "bytes": nbytes}
