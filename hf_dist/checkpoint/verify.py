"""`hf-dist checkpoint verify`: every byte of checkpoints against the digests taken as they were written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_dist.checkpoint import folder
from hf_dist.checkpoint.file_sums import Seen, damaged_files
from hf_dist.errors import CheckpointError

__all__ = ["Verdict", "checkpoints_in", "verify", "written_nbytes"]


@dataclass(frozen=True)
class Verdict:
    """What is wrong with one checkpoint."""

    path: Path
    nbytes: int
    """Bytes that have a digest."""
    problems: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Whether it holds what was written."""
        return not self.problems


def checkpoints_in(path: Path) -> list[Path]:
    """`path` if it is a checkpoint of hf_dist, else those in it, by number. Raises `CheckpointError` if there are none."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder")
    if (path / folder.MANIFEST).exists():
        return [path]
    found = [inside for inside in sorted(path.iterdir()) if (inside / folder.MANIFEST).exists()]
    found = [inside for inside in found if not inside.name.startswith(".")]
    if not found:
        raise CheckpointError(
            f"{path} holds no {folder.MANIFEST}, and no folder in it does: no checkpoint of hf_dist is here"
        )
    return sorted(found, key=lambda inside: (len(inside.name), inside.name))


def written_nbytes(path: Path) -> int:
    """Bytes that will be read; 0 if the manifest cannot be."""
    try:
        return sum(nbytes for nbytes, _ in folder.written(path).values())
    except CheckpointError:
        return 0


def verify(paths: list[Path], seen: Seen = lambda _: None) -> Iterator[Verdict]:
    """One verdict after the other; `seen` is told of bytes that were read."""
    for path in paths:
        try:
            problems, wanted = folder.incomplete(path), folder.written(path)
        except CheckpointError as error:
            yield Verdict(path, 0, (str(error),))
            continue
        if not wanted:
            problems.append("no digests: it was saved by an older version of hf_dist, and only sizes can be compared")
        else:
            damaged = damaged_files(path, wanted, seen=seen)
            missing = [name for name in damaged if not (path / name).is_file()]  # `incomplete` names those
            problems += [f"{name} does not hold the bytes that were written" for name in damaged if name not in missing]
        yield Verdict(path, sum(nbytes for nbytes, _ in wanted.values()), tuple(problems))
