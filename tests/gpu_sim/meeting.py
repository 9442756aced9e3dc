"""Where simulated ranks in different processes leave what the others ask for: a folder, one file for each answer."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hf_dist.dist.patience import Patience

PATIENCE_SECONDS = 60.0


class Meeting:
    """A place for answers; each has a key of its own and stays."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(exist_ok=True)

    def set(self, key: str, value: bytes) -> None:
        """Leave an answer."""
        place = self._place(key)
        new = place.with_suffix(".new")
        new.write_bytes(value)
        new.rename(place)

    def get(self, key: str) -> bytes:
        """Wait for an answer. Raises `TimeoutError` if nobody leaves it."""
        place = self._place(key)
        if not Patience(PATIENCE_SECONDS).until(place.exists, every=0.005):
            raise TimeoutError(f"no other rank came to {key}")
        return place.read_bytes()

    def _place(self, key: str) -> Path:
        return self._folder / hashlib.sha1(key.encode()).hexdigest()
