"""`expert_load.json`: rows that every expert of a training has got, as the Trainer writes it into its output folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from hf_dist.errors import CheckpointError

__all__ = ["FILE", "ExpertLoad", "read_load", "write_load"]

FILE = "expert_load.json"


@dataclass(frozen=True)
class ExpertLoad:
    """Rows of each expert between two steps, over all ranks."""

    ranks: int
    """Ranks that a layer's experts are spread over; each has neighbouring experts, the same number."""
    first_step: int
    last_step: int
    layers: dict[str, list[int]]
    """Path of the experts in the model -> rows of each expert."""

    def ratios(self, path: str) -> tuple[float, float]:
        """(of an expert, of a rank): the most rows in a layer over the mean. 1 is even."""
        rows = self.layers[path]
        own = len(rows) // self.ranks
        of_ranks = [sum(rows[i : i + own]) for i in range(0, len(rows), own)]
        mean = max(sum(rows), 1)
        return max(rows) * len(rows) / mean, max(of_ranks) * self.ranks / mean


def write_load(folder: Path, load: ExpertLoad) -> None:
    """Local; one rank calls it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(asdict(load)) + "\n", encoding="utf-8")


def read_load(path: Path) -> ExpertLoad:
    """Of a file, or of the file in a folder. Raises `CheckpointError` where there is none, or another one."""
    file = path / FILE if path.is_dir() else path
    try:
        return ExpertLoad(**json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be read ({error.strerror}). A Trainer writes it at a checkpoint and at its end, after its first "
            "log, where expert_parallel.enabled and hf_dist.log_measurements are true"
        ) from None
    except (ValueError, TypeError):
        raise CheckpointError(f"{file}: is not a file that a Trainer of hf_dist has written") from None
