"""One safetensors file on disk: created at its final size, written at offsets, read back and compared with the plan."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from hf_dist.checkpoint import unwritable
from hf_dist.checkpoint.file_sums import FileSums
from hf_dist.checkpoint.folder import start_writeback
from hf_dist.checkpoint.safetensors_header import read_header
from hf_dist.checkpoint.weight_plan import WeightFile, WeightPlan
from hf_dist.errors import CheckpointError

__all__ = ["OpenFiles", "create", "difference", "explain", "remove_stale"]

_WEIGHTS = re.compile(r"^(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?$")


def create(folder: Path, file: WeightFile) -> None:
    """Write the header and give the file its final size; `OpenFiles.write` adds the data. Raises OSError."""
    path = folder / file.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(
        missing_ok=True
    )  # a model may still map the file: truncating it in place would crash the process on its next read
    with _naming(path), open(path, "wb") as out:
        out.write(file.header)
        out.truncate(file.nbytes)


def remove_stale(folder: Path, plan: WeightPlan) -> None:
    """Delete weight files of an earlier save that `plan` does not replace, because `from_pretrained` would load them."""
    kept = {*(file.name for file in plan.files), *plan.indexes}
    for below in {Path(name).parent for name in kept}:
        for path in (folder / below).glob("*model*.safetensors*"):
            if _WEIGHTS.match(path.name) and str(below / path.name) not in kept:
                path.unlink()


def difference(folder: Path, file: WeightFile) -> str | None:
    """How the file on disk differs from the plan (names, shapes, dtypes, byte ranges, size); None if it does not."""
    path = folder / file.name
    try:
        found = read_header(path).tensors
    except CheckpointError as error:
        return str(error)
    expected = json.loads(file.header[8:])
    expected.pop("__metadata__")
    for name in expected.keys() | found.keys():
        if expected.get(name) != found.get(name):
            return f"{path}: {name} should be {expected.get(name, 'absent')}, the file has {found.get(name, 'nothing')}"
    return None


class OpenFiles:
    """Writes at offsets into the files of one folder. A file is flushed to disk when the next one begins."""

    def __init__(self, folder: Path, sums: FileSums | None = None) -> None:
        """`sums`: adds up what is written."""
        self._folder = folder
        self._sums = sums
        self._name = ""
        self._descriptor = -1

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, name: str, offset: int, data: torch.Tensor) -> None:
        """Write `data` (1-D uint8, on the CPU) at byte `offset` of an existing file. Raises OSError."""
        if name != self._name:
            self.close()
            self._descriptor, self._name = os.open(self._folder / name, os.O_WRONLY), name
        left = data.numpy().data
        adding = self._sums.beside(name, offset, left) if self._sums is not None else nullcontext()
        with _naming(self._folder / name), adding:
            while left:
                done = os.pwrite(self._descriptor, left, offset)
                start_writeback(self._descriptor, offset, done)
                left, offset = left[done:], offset + done

    def close(self) -> None:
        """Flush and close the open file. Raises OSError: some file systems report a full disk only here."""
        descriptor, name, self._descriptor, self._name = self._descriptor, self._name, -1, ""
        if descriptor < 0:
            return
        try:
            with _naming(self._folder / name):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the path to errors, because calls on a descriptor raise errors without one."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def explain(error: OSError, folder: Path) -> str:
    """Explain a failed write to the user."""
    path = Path(error.filename or folder)
    return f"{path} could not be written: {unwritable.cause(error, path)}. {unwritable.remedy(error)}"
