"""Folders that no training can be resumed from: whose they are, and what to do with them instead. Files only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hf_dist.checkpoint import folder
from hf_dist.checkpoint.foreign import program_of

__all__ = ["why_not"]

_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "adapter_model.*")
_DCP = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} weights.pt"


def why_not(directory: Path, *, loads_itself: bool = False) -> str | None:
    """Why the Trainer cannot go on from `directory`, with the way to use it; None if it can. Local.

    The Trainer counts its steps in `trainer_state.json`, which it and hf_dist write. `loads_itself`: it is a user's or a
    library's Trainer, with its own files for weights.
    """
    if not directory.exists():
        return f"{directory} does not exist. {_beside(directory.parent, directory.parent.name or '.')}"
    if directory.is_file():
        return _FILES.get(
            directory.suffix, "{path} is a file; resume_from_checkpoint takes a checkpoint's folder."
        ).format(path=directory)
    counted = (directory / folder.TRAINER_STATE).is_file() or (directory / folder.MANIFEST).is_file()
    if counted and (loads_itself or program_of(directory) or _has(*_WEIGHTS, folder.STATE)(directory)):
        return None
    written = next((words for found, words in _PROGRAMS if found(directory)), None)
    if written is not None:
        return f"{directory} {written.format(path=directory)}"
    inside = ", ".join(sorted(p.name for p in directory.iterdir())[:6]) or "nothing"
    lacks = "weights" if counted else folder.TRAINER_STATE
    return (
        f"{directory} is no checkpoint of a Trainer: it has no {lacks} (there is {inside}). {_beside(directory, 'it')}"
    )


def _beside(root: Path, name: str) -> str:
    """Which checkpoints there are."""
    found = [path.name for path in reversed(folder.numbered(root))]
    last, _ = folder.newest_complete(root)
    if not found:
        return f"No checkpoint lies in {name}."
    newest = "" if last is None else f"; the newest complete one is {last.name}"
    return f"In {name} lie {', '.join(found)}{newest}."


def _has(*patterns: str) -> Callable[[Path], bool]:
    return lambda directory: any(True for pattern in patterns for _ in directory.glob(pattern))


_FILES = {
    ".ckpt": "{path} is a file of Lightning: resume it with its own `Trainer.fit(ckpt_path=...)`; for its weights, load "
    "torch.load(path)['state_dict'] into the model and start without resume_from_checkpoint.",
}
_PROGRAMS: tuple[tuple[Callable[[Path], bool], str], ...] = (
    (
        _has("*_model_states.pt", "*_optim_states.pt", "zero/*/fp32.pt"),
        "is a part of a checkpoint of DeepSpeed, without the Trainer's counts: name the folder above it.",
    ),
    (
        _has(".metadata", "*.distcp", "step-*/.metadata"),
        "is a folder of torch's distributed checkpoints (torchtitan writes such), without a Trainer's state. `"
        + _DCP
        + "` "
        "makes a file of its weights: load it into the model, and start without resume_from_checkpoint.",
    ),
    (
        _has("mp_rank_*", "latest_checkpointed_iteration.txt", "common.pt", "iter_*/mp_rank_*", "iter_*/common.pt"),
        "is a checkpoint of Megatron. Convert it to Hugging Face's format (Megatron Bridge, or the model's own converter), "
        "load that with from_pretrained, and start without resume_from_checkpoint.",
    ),
    (
        _has("*.ckpt"),
        "is a folder of Lightning: resume it with its own `Trainer.fit(ckpt_path=...)`; for the weights, load "
        "torch.load(file)['state_dict'] into the model and start without resume_from_checkpoint.",
    ),
    (
        _has("random_states_*.pkl"),
        "was written by accelerate's save_state: resume it with `accelerator.load_state({path!s})` in the loop that wrote it; "
        "for its weights, from_pretrained, and start without resume_from_checkpoint.",
    ),
    (
        _has(*_WEIGHTS),
        "is a model without a training state: load it with from_pretrained({path!s}), and start without "
        "resume_from_checkpoint.",
    ),
)
