"""Where the tensors of another program's checkpoint are, under hf_dist's names: mapped files, or torch DCP folders."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from hf_dist.checkpoint import dcp
from hf_dist.checkpoint.flat_slice import FlatSlice
from hf_dist.checkpoint.training_state import Stored

__all__ = ["DcpSource", "MappedSource", "Source", "load_file", "optimizer_name", "plain"]

Targets = Mapping[str, "FlatSlice | torch.Tensor"]


class Source(Protocol):
    """Tensors that can be read in parts."""

    @property
    def stored(self) -> Stored:
        """The stored tensors, under the names of `checkpoint/training_state.py`."""

    def read(self, targets: Targets) -> None:
        """Fill the targets in place. Local."""


class MappedSource:
    """Tensors mapped from files: a rank reads only the pages that it copies."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.stored: Stored = {name: (tuple(t.shape), _kept_dtype(name, t.dtype)) for name, t in tensors.items()}

    def read(self, targets: Targets) -> None:
        """Fill the targets in place. Local."""
        for name, target in targets.items():
            stored = self.tensors[name]
            if isinstance(target, FlatSlice):
                target.fill(stored)
            else:
                target.copy_(stored.reshape(target.shape))


class DcpSource:
    """Tensors in torch DCP folders under names that differ from hf_dist's."""

    def __init__(self) -> None:
        self._positions: dict[str, tuple[Path, str]] = {}
        self.stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def add(self, folder: Path, prefix: str, name_of: Any) -> None:
        """Add names that begin with `prefix`; `name_of` maps the rest to hf_dist's name (a scalar's, if it has no shape)."""
        for stored_name, (shape, dtype) in dcp.stored_tensors(folder).items():
            if stored_name.startswith(prefix):
                name = name_of(stored_name.removeprefix(prefix))
                self._positions[name] = (folder, stored_name)
                self.stored[name] = (shape, _kept_dtype(name, dtype))

    def read(self, targets: Targets) -> None:
        """Fill the targets in place. Local."""
        for folder in {self._positions[name][0] for name in targets}:
            state = {self._positions[n][1]: target for n, target in targets.items() if self._positions[n][0] == folder}
            dcp.read_state(folder, state)


def optimizer_name(rest: str) -> str:
    """hf_dist's name for `<parameter>.<key>` of a state."""
    parameter, _, key = rest.rpartition(".")
    return f"{'optimizer_scalar' if key == 'step' else 'optimizer'}.{key}.{plain(parameter)}"


def _kept_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """State shaped like a parameter is kept in fp32, whatever dtype the other program used."""
    return torch.float32 if dtype.is_floating_point and name.startswith("optimizer.") else dtype


def plain(name: str) -> str:
    """A parameter's name without the marks of wrappers that its program put around modules."""
    return (
        name.replace("_orig_mod.", "").replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")
    )


def load_file(path: Path) -> Any:
    """Load a file of `torch.save`; tensors are mapped, not read."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:
        if zipfile.is_zipfile(path):
            raise
        return torch.load(
            path, map_location="cpu", weights_only=True
        )  # the format before torch 1.6, which cannot be mapped
