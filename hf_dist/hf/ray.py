"""Reports a DistTrainer's log and its complete checkpoints to Ray Train.

With Ray's own callback every worker copies the whole folder to the same place, and with `checkpoint.async_save` it copies the
checkpoint before the newest. Source: ray 2.60, train/huggingface/transformers/_transformers_utils.py,
train/v2/api/train_fn_utils.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

__all__ = ["RayReportCallback"]


class RayReportCallback(TrainerCallback):
    """Reports at each save and at the end, from all workers, as Ray requires. Only rank 0 passes the folders.

    Use `upload=False` if `output_dir` is inside Ray's own storage (`run_config.storage_path/name`). Nothing is copied then.
    """

    def __init__(self, upload: bool = True) -> None:
        self.upload = upload
        self._unreported: list[Path] = []

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Report complete checkpoints. One still being written in the background follows with the next report."""
        self._unreported.append(Path(args.output_dir or ".", f"checkpoint-{state.global_step}"))
        self._report(args, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Report the last log and checkpoint; the Trainer has waited for the save."""
        self._report(args, state)

    def _report(self, args: Any, state: Any) -> None:
        from ray import train
        from ray.train import Checkpoint, CheckpointUploadMode

        newest = None
        if args.process_index == 0:
            ready = [path for path in self._unreported if path.is_dir()]  # named only when complete
            newest = ready[-1] if ready else None
            self._unreported = [path for path in self._unreported if path not in ready]
        metrics = {key: value for entry in state.log_history for key, value in entry.items()}
        mode = CheckpointUploadMode.SYNC if self.upload else CheckpointUploadMode.NO_UPLOAD
        train.report(
            {**metrics, "step": state.global_step},
            checkpoint=None if newest is None else Checkpoint.from_directory(newest),
            checkpoint_dir_name=None if newest is None else newest.name,
            checkpoint_upload_mode=mode,
        )
