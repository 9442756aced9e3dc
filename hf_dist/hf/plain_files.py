"""Small files of states, read without running code out of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hf_dist.errors import CheckpointError

__all__ = ["plain_file"]


def plain_file(path: Path) -> Any:
    """Load a file of `torch.save`, unpickling only tensors, numbers and strings. Local. Raises `CheckpointError`."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, zipfile and pickle each raise their own types
        reason = str(error).splitlines()[0] if str(error) else ""
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {reason}). State dicts of schedulers, loaders and registered "
            "objects may hold tensors, numbers, strings, lists and dicts."
        ) from error
