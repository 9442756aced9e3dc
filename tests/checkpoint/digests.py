"""What a rank does in the tests of digests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.checkpoint.grid import start, train
from tests.checkpoint.writing import message_of


def save(rank: int, world: int, root: str) -> list[str]:
    """One step, one checkpoint; the files whose digests were read from the disk."""
    from hf_dist.checkpoint import folder

    read: list[str] = []
    whole = folder.digest_of

    def noted(path: Path) -> str:
        read.append(path.name)
        return whole(path)

    folder.digest_of = noted
    try:
        engine = start(3)
        train(engine, 0, 1)
        engine.save_checkpoint(Path(root) / "checkpoint-1")
    finally:
        folder.digest_of = whole
    return read


def reseal(checkpoint: Path, **facts: Any) -> None:
    """Make the manifest agree with files that were changed, as somebody does who wants them to be taken; change its entries."""
    from hf_dist.checkpoint import folder

    manifest = json.loads((checkpoint / folder.MANIFEST).read_text()) | facts
    manifest["files"] = {name: (checkpoint / name).stat().st_size for name in manifest["files"]}
    manifest["digests"] = {name: folder.digest_of(checkpoint / name) for name in manifest["files"]}
    manifest["own_digest"] = folder._own_digest(manifest)
    (checkpoint / folder.MANIFEST).write_text(json.dumps(manifest))


def load_damaged(rank: int, world: int, damaged: list[str], whole: str) -> dict[str, Any]:
    """What the load of each folder says, and that of a whole one after them; the first once more without a check."""
    engine = start(1, seed=7)
    said = [message_of(lambda path=path: engine.load_checkpoint(path)) for path in damaged]  # type: ignore[misc]
    found = {"refused": said, "whole": message_of(lambda: engine.load_checkpoint(whole))}
    object.__setattr__(engine.config.checkpoint, "verify", False)
    states = [path for path, text in zip(damaged, said, strict=True) if "model.safetensors" in text]
    return found | {
        "unverified": "".join(message_of(lambda path=path: engine.load_checkpoint(path)) for path in states)
    }  # type: ignore[misc]
