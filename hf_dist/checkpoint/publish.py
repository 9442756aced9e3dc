"""How a sealed folder gets the name of a checkpoint: by a rename, or file by file into a folder that holds more than we wrote.

Only what we have written is ours. A folder with anything else in it (a working folder with sources and data, notes beside a
checkpoint), one in which this process works, a link and a mount point stay where they are: the new files are moved in, and
those of the save before, named in its manifest, go. A kill in between leaves a folder without a manifest, which nobody takes
for a checkpoint, and the rest beside it; `finish` goes on. Files only; one process calls these.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from hf_dist.checkpoint import lock
from hf_dist.checkpoint.folder import (
    LATEST,
    MANIFEST,
    READY,
    REPLACED,
    WEIGHTS,
    WORKING,
    flush,
    incomplete,
    is_inside,
    read_manifest,
)
from hf_dist.errors import CheckpointError

__all__ = ["finish", "is_ours", "publish", "recover"]

_BEFORE = ".files_of_the_save_before.json"


def publish(working: Path, final: Path) -> None:
    """Give the sealed folder `working` the name `final`, and write that name into `latest`.

    An earlier checkpoint of that name is replaced; whatever else is in its folder stays.
    """
    problems = incomplete(working)
    if problems:
        raise CheckpointError(f"{working} is not complete, {final.name} was not written: {problems[0]}")
    finish(final)
    if not os.path.lexists(final):
        os.rename(working, final)
    elif is_ours(final):
        _swap(working, final)
    else:
        (working / _BEFORE).write_text(json.dumps(sorted(_written_before(final))), encoding="utf-8")
        os.rename(working, _ready(final))
        finish(final)
    latest = final.parent / f"{WORKING}{LATEST}"
    latest.write_text(final.name + "\n", encoding="utf-8")
    os.replace(latest, final.parent / LATEST)
    flush(final.parent)


def _swap(working: Path, final: Path) -> None:
    replaced = final.parent / f"{REPLACED}{final.name}"
    shutil.rmtree(replaced, ignore_errors=True)
    os.rename(final, replaced)
    os.rename(working, final)
    flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def is_ours(final: Path) -> bool:
    """Whether a save of ours has written everything in the folder, and renaming it takes it from nobody."""
    if final.is_symlink() or not final.is_dir() or os.path.ismount(final):
        return False
    try:
        works_here = Path.cwd().resolve().is_relative_to(final.resolve())
    except FileNotFoundError:  # the working folder was deleted
        works_here = False
    names = _written_before(final)
    return not works_here and all(_name(path, final) in names for path in final.rglob("*") if _is_file(path))


def finish(final: Path) -> None:
    """Go on with a publication that was cut off, which has left a folder beside `final`; nothing to do otherwise."""
    ready, replaced = _ready(final), final.parent / f"{REPLACED}{final.name}"
    if replaced.is_dir():
        if os.path.lexists(final):
            shutil.rmtree(replaced, ignore_errors=True)
        else:  # the process was killed between the two renames
            os.rename(replaced, final)
    if (ready / MANIFEST).is_file():
        target = final.resolve()
        target.mkdir(parents=True, exist_ok=True)
        before = _named_in(ready / _BEFORE)
        (target / MANIFEST).unlink(missing_ok=True)  # from here on it is no checkpoint, until all is there
        files = [path for path in ready.rglob("*") if _is_file(path) and path.name != _BEFORE]
        new = set((read_manifest(ready) or {})["files"])
        # As transformers' save_pretrained: from_pretrained would mix shards of two saves, or prefer one file to new shards.
        stale = {path.name for path in target.iterdir() if WEIGHTS.match(path.name)}
        for name in (before | stale) - new:
            (target / name).unlink(missing_ok=True)
        for path in sorted(files, key=lambda path: path == ready / MANIFEST):
            place = target / path.relative_to(ready)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, place)
        flush(target)
    shutil.rmtree(ready, ignore_errors=True)


def recover(root: Path) -> None:
    """Clean up below `root` after a killed process. What another job is writing now stays."""
    if not root.is_dir():
        return
    for beginning in (READY, REPLACED, WORKING):
        for left in root.glob(f"{beginning}*"):
            final = root / left.name.removeprefix(beginning)
            if lock.is_claimed(lock.writing_of(final)):
                continue
            if beginning != WORKING:
                finish(final)
            elif left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
    for left in lock.writers(root):
        if not lock.is_claimed(left):
            left.unlink(missing_ok=True)


def _ready(final: Path) -> Path:
    return final.parent / f"{READY}{final.name}"


def _written_before(final: Path) -> set[str]:
    """What the manifest in a folder names, and the manifest; empty for a folder that we have not written."""
    try:
        manifest = read_manifest(final)
    except CheckpointError:
        return set()
    return set() if manifest is None else {*manifest["files"], MANIFEST}


def _named_in(listed: Path) -> set[str]:
    try:
        return {name for name in json.loads(listed.read_text(encoding="utf-8")) if is_inside(name)} - {MANIFEST}
    except (OSError, ValueError):
        return set()


def _is_file(path: Path) -> bool:
    return path.is_symlink() or not path.is_dir()


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()
