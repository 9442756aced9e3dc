"""Which rows a run has had: of each lane of a stream, or of a set with an index; from the manifest alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from hf_dist.checkpoint import folder
from hf_dist.errors import CheckpointError

__all__ = ["DataSeen", "data_seen"]


@dataclass(frozen=True)
class DataSeen:
    """What `hf-dist checkpoint data` prints."""

    path: str
    step: int
    epoch: int
    """Number of the current epoch; those before were seen in full."""
    rows: int
    """Of the current epoch, over all data ranks."""
    lanes: tuple[int, ...]
    """Rows of each lane of a stream in the current epoch: lane l has the shards l, l + L, ... of L lanes. Empty: no stream."""

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)


def data_seen(path: Path) -> DataSeen:
    """Read the manifest of a checkpoint. Raises `CheckpointError` if it tells nothing of the data."""
    manifest = (folder.read_manifest(path) or {}) if path.is_dir() else {}
    position = manifest.get("position")
    if not isinstance(position, dict):
        raise CheckpointError(
            f"{path} tells nothing of the data: {folder.MANIFEST} has no position. Name a checkpoint of a Trainer of hf_dist, "
            "such as out/checkpoint-100."
        )
    lanes = tuple(position.get("lanes", {}).get("rows", ()))
    return DataSeen(str(path), manifest.get("step", 0), position["epoch"], position["samples"], lanes)
