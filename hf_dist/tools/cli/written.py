"""Paths that a command writes: tried before its work begins, and written after its result is printed."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import typer

from hf_dist.errors import ConfigError, HfDistError, Problem
from hf_dist.svg import check_picture, is_picture

__all__ = ["Kind", "check_written", "to_write", "write_texts", "writing"]

Kind = Literal["file", "picture", "folder", "folder or picture"]
_CREATE = "Create that folder first, or name another place."


def to_write(kind: Kind) -> Callable[..., Path | None]:
    """The `callback` of a typer option or argument that names what the command writes: it is tried before the command begins.

    Every parameter that names a written path has one; its attribute `writes` is `kind`.
    """

    def callback(param: typer.CallbackParam, value: Path | None) -> Path | None:
        name = param.opts[0] if param.opts[0].startswith("-") else (param.name or "").upper()
        if value is not None:
            check_written(name, value, kind)
        return value

    callback.writes = kind  # type: ignore[attr-defined]
    return callback


def check_written(option: str, path: Path, kind: Kind) -> None:
    """Raise a `ConfigError` that names `option` if `path` cannot be written. Leaves nothing behind.

    A file needs its folder. A folder may be missing: the command creates it.
    """
    is_file = kind in ("file", "picture") or (kind == "folder or picture" and is_picture(path))
    try:
        if is_file and kind != "file":
            check_picture(path, option)
        problem = _of_file(path) if is_file else _of_folder(path)
    except OSError as error:  # no permission, a read-only disk, a name that is too long
        problem = (f"cannot be written: {error.strerror}", "Name another place.")
    if problem is not None:
        raise ConfigError(Problem(option, str(path), *problem))


def _of_file(path: Path) -> tuple[str, str] | None:
    """(what is wrong, the fix), or None."""
    if path.is_dir():
        return "is a folder", "Name a file."
    if not path.parent.is_dir():
        return f"cannot be written: {path.parent} is {_what(path.parent)}", _CREATE
    if path.is_file():
        with path.open("ab"):
            return None
    if not path.exists():  # a pipe or a device is not tried
        with tempfile.TemporaryFile(dir=path.parent):
            return None
    return None


def _of_folder(path: Path) -> tuple[str, str] | None:
    """(what is wrong, the fix), or None. Missing folders count as their nearest parent."""
    there = path.absolute()
    while not there.exists() and there.parent != there:
        there = there.parent
    if not there.is_dir():
        return f"cannot be written: {there} is {_what(there)}", "Name another place."
    with tempfile.TemporaryFile(dir=there):
        return None


def _what(path: Path) -> str:
    return "a file" if path.exists() else "no folder"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around the writing of `path`, after the result was printed: a full disk ends in a `HfDistError`."""
    try:
        yield
    except OSError as error:
        raise HfDistError(
            f"{path} could not be written: {error.strerror or error}. The result is printed above."
        ) from None


def write_texts(files: Mapping[Path, str], *, show: bool = False) -> None:
    """Write every file of `files` (path -> text). `show`: print the texts if that fails, because nothing else has."""
    try:
        for path, text in files.items():
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    except HfDistError:
        if show:
            print("".join(files.values()), end="", flush=True)
        raise
