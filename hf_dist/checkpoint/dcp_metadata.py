"""Reads DCP's `.metadata` without running what is in it: a pickle from which only DCP's own descriptions are made.

A checkpoint may come from anybody. [Note: names in a pickle] A pickle names what it calls, and a name may have dots
("os.system" of a module that imports os), so a list of modules or of beginnings of names lets everything through. Only exact
pairs of module and name are found here, all of them constructors of plain values.
"""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.serialization import _get_layout

from hf_dist.errors import CheckpointError

__all__ = ["read_metadata"]

_DESCRIPTIONS = {
    described: "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
    "TensorStorageMetadata _MEM_FORMAT_ENCODING",
    filesystem: "_StorageInfo _StoragePrefix",
}
_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")


def _member(kind: object, name: object) -> object:
    """A member of an enumeration; Python 3.11.0 to 3.11.3 pickle it as `getattr(its class, its name)`."""
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(name, str) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"an attribute {name!r} of {kind!r} has no place in the metadata of a checkpoint")


def _found() -> dict[tuple[str, str], object]:
    """Everything that a pickle of metadata may name."""
    found: dict[tuple[str, str], object] = {
        ("torch", "Size"): torch.Size,
        ("torch", "device"): torch.device,
        ("torch.serialization", "_get_layout"): _get_layout,
        ("collections", "OrderedDict"): dict,
        ("builtins", "getattr"): _member,
    }
    for name, value in vars(torch).items():
        if isinstance(value, (torch.dtype, torch.memory_format)):
            found["torch", name] = value
    # Which system wrote the checkpoint does not matter, and paths of the other system cannot be made.
    for module in ("pathlib", "pathlib._local"):
        found.update({(module, name): PureWindowsPath if "Windows" in name else PurePosixPath for name in _PATHS})
    for of, names in _DESCRIPTIONS.items():
        found.update({(of.__name__, name): getattr(of, name) for name in names.split() if hasattr(of, name)})
    return found


_FOUND = _found()
_CLASSES = tuple(
    {getattr(of, name) for of, names in _DESCRIPTIONS.items() for name in names.split() if hasattr(of, name)}
)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _FOUND:
            return _FOUND[module, name]
        raise pickle.UnpicklingError(f"{module}.{name} has no place in the metadata of a checkpoint")


def read_metadata(folder: Path) -> Metadata:
    """Which tensors are stored where below `folder`. Local.

    Raises `CheckpointError`, which names the file, for anything but what DCP writes: other names in the pickle, other types,
    sizes below zero, files outside of `folder`.
    """
    path = folder / ".metadata"
    try:
        with open(path, "rb") as file:
            metadata = _unpickled(file)
        _check(metadata, folder)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no .metadata: it is no checkpoint of torch's DCP, or not a complete one"
        ) from None
    except CheckpointError:
        raise
    except Exception as error:  # a pickle can make its reader raise anything
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{path} is not what torch's DCP writes, and nothing of it was used ({reason})"
        ) from error
    return metadata


def _unpickled(file: BinaryIO) -> Metadata:
    """A pickle can set attributes of the classes that it names; they are put back."""
    before = [dict(vars(kind)) for kind in _CLASSES]
    try:
        return _Unpickler(file).load()
    finally:
        changed = False
        for kind, own in zip(_CLASSES, before, strict=True):
            for name in {**vars(kind)}:
                if name not in own:
                    delattr(kind, name)
                    changed = True
            for name, value in own.items():
                if vars(kind).get(name) is not value:
                    setattr(kind, name, value)
                    changed = True
        if changed:
            raise pickle.UnpicklingError("it changes classes")


def _check(metadata: object, folder: Path) -> None:
    if type(metadata) is not Metadata or not isinstance(metadata.state_dict_metadata, dict):
        raise ValueError(f"it holds {type(metadata).__name__}, not Metadata")
    for name, item in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or type(item) not in (TensorStorageMetadata, BytesStorageMetadata):
            raise ValueError(f"{name!r} is {type(item).__name__}")
        if isinstance(item, TensorStorageMetadata):
            _sizes(name, item.size)
            for chunk in item.chunks:
                _sizes(name, chunk.offsets)
                _sizes(name, chunk.sizes)
    files = set()
    for index, info in (metadata.storage_data or {}).items():
        if type(info) is not filesystem._StorageInfo or type(index) is not described.MetadataIndex:
            raise ValueError(f"{type(index).__name__} is stored as {type(info).__name__}")
        _sizes(index.fqn, (info.offset, info.length))
        files.add(info.relative_path)
    for file in files:
        _inside(folder, file)


def _sizes(name: str, sizes: Any) -> None:
    for size in sizes:
        if type(size) is not int or not 0 <= size < 2**62:
            raise ValueError(f"{name} has {size!r} as a size or offset")


def _inside(folder: Path, file: object) -> None:
    if not isinstance(file, str) or PurePosixPath(file).name != file or file in ("", ".", ".."):
        raise ValueError(f"the file {str(file)!r} is not one beside it")
    if (folder / file).resolve().parent != folder.resolve():
        raise ValueError(f"the file {file!r} is a link that leads out of the folder")
