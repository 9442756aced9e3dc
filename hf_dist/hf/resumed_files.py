"""HF's own files of a checkpoint that a resume reads, checked: the trainer state and the schedule."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from transformers import TrainerState

from hf_dist.checkpoint import folder
from hf_dist.errors import CheckpointError

__all__ = ["check_trainer_state", "named_if_refused", "read_schedule"]

_ELSE = "Copy it again, or resume from another checkpoint of the run."


def check_trainer_state(directory: Path) -> None:
    """Raise `CheckpointError`, which names the file, unless the trainer state is of the step that the manifest names. Local.

    A checkpoint without a manifest, of another program, is left to HF.
    """
    manifest = folder.read_manifest(directory) if directory.is_dir() else None
    if manifest is None or not (directory / folder.STATE).is_dir():
        return
    path = directory / folder.TRAINER_STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        step = state["global_step"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error}). {_ELSE}") from error
    unknown = sorted(state.keys() - {field.name for field in dataclasses.fields(TrainerState)})
    if unknown:
        raise CheckpointError(
            f"{path} has {', '.join(unknown)}, which this transformers ({transformers.__version__}) does not know: another "
            "version has written it. Install that one, or take the entries out."
        )
    if type(step) is not int or step != manifest.get("step", step):
        raise CheckpointError(
            f"{path} says that {step!r} steps were made, {folder.MANIFEST} beside it says {manifest.get('step')}: one of them "
            f"was changed, or belongs to another checkpoint. {_ELSE}"
        )


@contextlib.contextmanager
def named_if_refused(directory: Path) -> Iterator[None]:
    """HF's own readers: what `weights_only` refuses, and what is no file of torch, is told with the folder's name."""
    try:
        yield
    except (pickle.UnpicklingError, EOFError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"a file of {directory} cannot be read, and nothing in it was run ({reason}). {_ELSE}"
        ) from error


def read_schedule(path: Path) -> dict[str, object]:
    """The state of a learning-rate schedule. Every rank reads it. Raises `CheckpointError`, which names the file."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict):
            raise TypeError(f"it holds {type(state).__name__}, not the state of a schedule")
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} cannot be read ({reason}). {_ELSE}") from error
    return state
