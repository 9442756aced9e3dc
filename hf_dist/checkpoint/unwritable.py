"""A folder that cannot be made or written: the cause as a user sees it, and what helps. Local."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from hf_dist.errors import ConfigError, Problem
from hf_dist.format_bytes import size_text

__all__ = ["cause", "make_folder", "remedy", "try_to_write"]


def cause(error: OSError, path: Path) -> str:
    """Why `path` could not be written, as a clause."""
    there = _nearest(path)
    if error.errno in (errno.ENOTDIR, errno.EEXIST) and not there.is_dir():
        return f"{there} is a file"
    if error.errno == errno.ENAMETOOLONG:
        longest = max(len(os.fsencode(part)) for part in path.parts)
        return f"a path of {len(os.fsencode(path))} bytes, with a name of {longest}, is too long"
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{reason}, {size_text(shutil.disk_usage(there).free)} free"
    return f"{reason}: {there}" if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT) else reason


def remedy(error: OSError) -> str:
    """What helps, as a sentence."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free space, keep fewer checkpoints (save_total_limit), or choose another folder."
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "Choose a folder in which this process may write."
    if error.errno == errno.EFBIG:
        return "The file system or `ulimit -f` allows no file of this size: choose a smaller max_shard_size, or another folder."
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return "Choose another folder, or move that file away."
    if error.errno == errno.ENAMETOOLONG:
        return "Choose shorter names: most file systems take 255 bytes per name, 4095 per path."
    if error.errno == errno.ENOENT:
        return "Choose another folder: nothing can be made there, or something has removed it."
    return "Choose another folder."


def make_folder(path: str, parameter: str) -> None:
    """Make the folder that a user has named. Raises `ConfigError` with `parameter`, the cause and what helps."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        what = f"cannot be made: {cause(error, Path(path))}"
        raise ConfigError(Problem(parameter, repr(path), what, remedy(error))) from error


def try_to_write(folder: Path) -> OSError | None:
    """The error of a file in `folder`; None if one can be written. Leaves nothing behind."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error


def _nearest(path: Path) -> Path:
    """The nearest of `path` and its parents that exists."""
    there = path.absolute()
    while not os.path.lexists(there) and there.parent != there:  # a name that is too long does not exist
        there = there.parent
    return there
