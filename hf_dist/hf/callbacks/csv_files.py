"""The training log as one CSV file per value, as DeepSpeed's `csv_monitor` writes it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_dist.config.sections import CsvMonitorConfig


class CsvCallback(TrainerCallback):
    """Appends every number of the log to `output_path/job_name/NAME.csv` (columns step, NAME), on the main process.

    A slash in a name becomes an underscore.
    """

    def __init__(self, config: CsvMonitorConfig) -> None:
        self._config = config

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the values of one record."""
        if not state.is_world_process_zero:
            return
        folder = Path(self._config.output_path or args.output_dir or ".") / self._config.job_name
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in (kwargs.get("logs") or {}).items():
            if isinstance(value, (int, float)):
                _append(folder / f"{name.replace('/', '_')}.csv", name, state.global_step, value)


def _append(path: Path, name: str, step: int, value: float) -> None:
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(["step", name])
        writer.writerow([step, value])
