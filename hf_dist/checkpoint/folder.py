"""The life of a checkpoint folder: written under a working name, sealed by a manifest, rotated. Files only.

A folder with its final name is complete: the manifest is written last, then the folder is renamed. A kill at any moment
leaves the previous checkpoint unchanged, and at most a working folder, whose name no tool takes for a checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, cast

from hf_dist.checkpoint.file_sums import digest_of
from hf_dist.errors import CheckpointError
from hf_dist.log import warn_once

MANIFEST = "hf_dist.json"
STATE = "hf_dist_state"
LATEST = "latest"
NOT_FINITE = "not_finite"
"""Entry of a manifest: a parameter with an infinity or nan."""
FORMAT = 1
"""Increased when older versions can no longer read a checkpoint."""

WORKING = ".incomplete-"
READY = ".ready-"
REPLACED = ".replaced-"
"""Beginnings of names: of a folder that is written, of a sealed one whose files are moved, of one whose name was taken over."""
WEIGHTS = re.compile(r"^model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?$")
_NUMBERED = re.compile(r"^checkpoint([-_])(\d+)$")
_WRITTEN = "written"
"""Entry of a manifest: the time of the save, later than that of every checkpoint beside it, whatever the clocks say."""
_NAME = "name"
"""Entry of a manifest: the folder's, when it was saved. Under another one it is a user's copy."""
TRAINER_STATE = "trainer_state.json"
_TEXTS = (".md", ".txt", ".json", ".jinja", ".py", ".yaml", ".yml")


def folder_of(directory: object, call: str) -> Path:
    """The folder that a user has named in a `call`. Raises `CheckpointError` for nothing, which is no folder."""
    if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
        raise CheckpointError(
            f"{call} needs the path of a folder, found {directory!r}. Pass for example 'out/checkpoint-100'."
        )
    return Path(directory).expanduser()


def working_folder(final: Path) -> Path:
    """Where `final` is written until it is complete; no tool takes this name for a checkpoint."""
    return final.parent / f"{WORKING}{final.name}"


def final_of(working: Path) -> Path:
    """The folder that `working_folder` belongs to."""
    return working.with_name(working.name.removeprefix(WORKING))


def begin(final: Path) -> Path:
    """Create an empty working folder for `final`. One process calls it."""
    working = working_folder(final)
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)
    return working


def seal(working: Path, facts: Mapping[str, object], digests: Mapping[str, str] | None = None) -> None:
    """Write the manifest: `facts`, every file with its size and digest. All files are flushed to disk first. One process.

    `digests`: those that were taken while files were written; the others are small, and read again.
    """
    files = {str(p.relative_to(working)): p.stat().st_size for p in sorted(working.rglob("*")) if p.is_file()}
    taken = digests or {}
    digests = {name: taken.get(name) or digest_of(working / name) for name in files}
    for name in files:
        flush(working / name)
    manifest = working / MANIFEST
    times = [written_at(p) for p in numbered(working.parent)]
    now = max([time.time(), *(before + 1e-3 for before in times)])
    content = {
        "format": FORMAT,
        **facts,
        _NAME: final_of(working).name,
        _WRITTEN: now,
        "files": files,
        "digests": digests,
    }
    content["own_digest"] = _own_digest(content)
    manifest.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    flush(manifest)
    for folder in [working, *(p for p in working.rglob("*") if p.is_dir())]:
        flush(folder)


def move_files(working: Path, target: Path, last: str) -> None:
    """Move everything from `working` into `target`, `last` at the end. Deletes weight files of an older save. One process."""
    moved = sorted((p for p in working.rglob("*") if p.is_file()), key=lambda p: p.name == last)
    names = {str(p.relative_to(working)) for p in moved}
    for path in moved:
        flush(path)
        place = target / path.relative_to(working)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, place)
    for old in target.iterdir():
        if (WEIGHTS.match(old.name) or old.name == last) and old.name not in names:
            old.unlink()
    shutil.rmtree(working)


def is_inside(name: object) -> bool:
    """Whether `name`, which stands in a file of a checkpoint, is the path of a file below that checkpoint."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and str(path) != "."


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, or None if there is none. Raises `CheckpointError` if it cannot be read or is too new."""
    path = folder / MANIFEST
    try:
        if not path.is_file():
            return None
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version = _checked_format(manifest)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    if version > FORMAT:
        raise CheckpointError(
            f"{folder} was written by hf_dist {manifest.get('hf_dist', '?')} in format {version}; this version reads format "
            f"{FORMAT}. Upgrade hf_dist, or start from the weights with from_pretrained({str(folder)!r})."
        )
    return cast("dict[str, Any]", manifest)


def _checked_format(manifest: Any) -> int:
    """The format of a manifest whose fields are what `seal` writes; of a newer one, only the format is looked at."""
    version = manifest["format"]
    if type(version) is not int or version < 1:
        raise ValueError(f"its format is {version!r}")
    if version > FORMAT:
        return version
    step = manifest.get("step", 0)
    if type(step) is not int or step < 0:
        raise ValueError(f"its step is {step!r}")
    for name in ("files", *(name for name in ("arguments", "position", "layout") if name in manifest)):
        if not isinstance(manifest[name], dict):
            raise ValueError(f"its entry {name!r} is no object")
    for name, size in manifest["files"].items():
        if not is_inside(name) or type(size) is not int or size < 0:
            raise ValueError(f"its files have {name!r} with {size!r} bytes")
    digests = manifest.get("digests", {})  # absent in checkpoints of older versions
    if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
        raise ValueError("its digests are no object of texts")
    if not isinstance(manifest.get(_WRITTEN, 0.0), (int, float)):
        raise ValueError(f"its time is {manifest[_WRITTEN]!r}")
    if "own_digest" in manifest and manifest["own_digest"] != _own_digest(manifest):
        raise ValueError("it is not what was written: its own_digest differs")
    return version


def _own_digest(manifest: Mapping[str, object]) -> str:
    """Of everything else in the manifest."""
    rest = {key: value for key, value in manifest.items() if key != "own_digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:16]


def written(folder: Path) -> dict[str, tuple[int, str]]:
    """File -> bytes and digest, as the manifest has them; empty for an older version's. Raises as `read_manifest`.

    Without texts that people edit (`is_text`).
    """
    manifest = read_manifest(folder) or {}
    digests, files = manifest.get("digests", {}), manifest.get("files", {})
    return {name: (size, digests[name]) for name, size in files.items() if name in digests and not is_text(name)}


def is_text(name: str) -> bool:
    """Whether a file of a checkpoint is one that people edit, and no resume depends on: a model card, configs, tokenizers.

    Weights, their plan and index, states and what the Trainer counts are not.
    """
    path = PurePosixPath(name)
    ours = path.parts[0] == STATE or path.name.startswith("hf_dist")
    counted = ours or name == TRAINER_STATE or name.endswith(".index.json")
    return path.suffix in _TEXTS and not counted


def edited(folder: Path) -> list[str]:
    """Texts of a checkpoint that are not as they were written; their sizes are compared. Raises as `read_manifest`."""
    files = (read_manifest(folder) or {}).get("files", {})
    return [name for name, size in files.items() if is_text(name) and _size(folder / name) != size]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def incomplete(folder: Path) -> list[str]:
    """Files that are missing or differ in size from the manifest; empty for a complete checkpoint of hf_dist.

    Texts that people edit (`is_text`) may be different, or gone.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return [f"no {MANIFEST}: it was not finished, or not written by hf_dist"]
    if not manifest["files"]:
        return [f"{MANIFEST} names no files"]
    problems = []
    inside = folder.resolve()
    for name, size in manifest["files"].items():
        path = folder / name
        if is_text(name):
            continue
        try:
            if not path.is_file():
                problems.append(f"{name} is missing")
            elif path.stat().st_size != size:
                problems.append(f"{name} has {path.stat().st_size} bytes, {size} were written")
            elif inside not in path.resolve().parents:
                problems.append(f"{name} is a link that leads out of the checkpoint")
        except OSError as error:
            problems.append(f"{name} cannot be read ({error})")
    return problems


def numbered(root: Path, separators: str = "-_") -> list[Path]:
    """`checkpoint-N` (the Trainer's) and `checkpoint_N` (accelerate's) folders below `root`, the last written first.

    A run that goes on from an older checkpoint writes numbers below those that are there: the time says what came last.
    """
    if not root.is_dir():
        return []
    found = [
        (written_at(p), int(m.group(2)), p)
        for p in root.iterdir()
        if p.is_dir() and (m := _NUMBERED.match(p.name)) and m.group(1) in separators
    ]
    return [p for _, _, p in sorted(found, reverse=True)]


def higher(root: Path, last: Path) -> list[str]:
    """Names of checkpoints with a higher number than that of `last`, which was written after them."""
    found = [p.name for p in numbered(root)]
    if last.name not in found:
        return []
    return [name for name in found[found.index(last.name) :] if _number(name) > _number(last.name)]


def _number(name: str) -> int:
    found = _NUMBERED.match(name)
    return int(found.group(2)) if found else -1


def _is_copy(folder: Path) -> bool:
    try:
        return (read_manifest(folder) or {}).get(_NAME, folder.name) != folder.name
    except CheckpointError:
        return False


def written_at(folder: Path) -> float:
    """When a checkpoint was saved, in seconds; of other programs', when its last file was written."""
    try:
        manifest = read_manifest(folder) or {}
    except CheckpointError:  # damaged
        manifest = {}
    try:
        last = next((folder / name for name in (MANIFEST, TRAINER_STATE) if (folder / name).exists()), folder)
        return float(manifest.get(_WRITTEN, last.stat().st_mtime))
    except OSError:
        return 0.0


def newest_complete(root: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that can be resumed from, and why newer ones were skipped.

    A folder without hf_dist's manifest counts if it holds a trainer state, which the stock Trainer writes last.
    """
    skipped: list[str] = []
    for folder in numbered(root):
        try:
            problems = incomplete(folder)
            stock = bool(problems) and not (folder / MANIFEST).exists() and (folder / TRAINER_STATE).is_file()
        except (CheckpointError, OSError) as error:
            problems, stock = [str(error)], False
        if not problems or stock:
            return folder, skipped
        skipped.append(f"{folder.name}: {problems[0]}")
    return None, skipped


def complete(root: Path) -> list[Path]:
    """Every complete checkpoint below `root`, whatever its name, by step. Includes those of the stock Trainer."""
    found: list[tuple[int, float, Path]] = []
    for path in root.iterdir() if root.is_dir() else ():
        try:
            stock = _NUMBERED.match(path.name) if (path / TRAINER_STATE).is_file() else None
            manifest = read_manifest(path) if not path.name.startswith(".") and path.is_dir() else None
            if manifest is not None and not incomplete(path):
                found.append((int(manifest.get("step", 0)), written_at(path), path))
            elif stock and manifest is None:
                found.append((int(stock.group(2)), written_at(path), path))
        except (CheckpointError, OSError):  # damaged, or deleted meanwhile
            continue
    return [path for _, _, path in sorted(found)]


def rotate(root: Path, limit: int | None, keep: Iterable[Path], separator: str = "-") -> list[Path]:
    """Delete the checkpoints beyond `limit` that were written first, never one in `keep`, or a newest complete or finite one.

    One process calls it. Like HF's `save_total_limit`; `limit` None or not positive keeps all. Returns the deleted folders.
    Folders of the other `separator`, links, copies and renamed ones are a user's. What was written after the newest complete
    one stays, too.
    """
    if limit is None or limit <= 0:
        return []
    found = [p for p in numbered(root, separator) if not p.is_symlink() and not _is_copy(p)]
    newest, skipped = newest_complete(root)
    for reason in skipped:
        warn_once(f"{root}: not counted as a checkpoint to resume from: {reason}")
    after = found[: found.index(newest)] if newest in found else []
    kept = {p.resolve() for p in (*keep, *after, newest, _newest_finite(found)) if p is not None}
    # Even with a limit of one, HF keeps the best checkpoint next to the newest.
    surplus = len(found) - max(limit, len(kept & {p.resolve() for p in found}))
    doomed = [p for p in reversed(found) if p.resolve() not in kept][: max(surplus, 0)]
    removed = []
    for folder in doomed:
        try:
            remove(folder)
            removed.append(folder)
        except OSError as error:  # a save that is done does not fail for an older one
            warn_once(f"{folder} is beyond the limit of {limit} checkpoints and cannot be removed: {error}")
    return removed


def _newest_finite(found: Iterable[Path]) -> Path | None:
    """A run whose weights became nan in the night goes on and saves; what it had before is worth more than those."""
    for folder in found:
        try:
            if not incomplete(folder) and not (read_manifest(folder) or {}).get(NOT_FINITE):
                return folder
        except (CheckpointError, OSError):
            continue
    return None


def remove(folder: Path) -> None:
    """Delete a checkpoint; it need not exist. One process calls it."""
    # Renamed first, because a kill during the deletion must not leave half a checkpoint under its name.
    half = folder.parent / f"{WORKING}{folder.name}-deleted"
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, half)
    shutil.rmtree(half, ignore_errors=True)


def start_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Make the disk start writing bytes just written, so that the final flush finds little left. Returns at once."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        # On Linux this starts to write dirty pages; only pages already on the disk leave memory.
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)


def flush(path: Path) -> None:
    """Have a file or folder written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some file systems cannot flush folders
        if path.is_file():
            raise
    finally:
        os.close(descriptor)
