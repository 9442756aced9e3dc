"""What a DistTrainer tells Ray Train: its log, and its checkpoints once they are complete.

Ray's own callback has every worker copy the whole folder to the same place; with `checkpoint.async_save` it is the one before
the newest. Source: ray 2.60, train/huggingface/transformers/_transformers_utils.py, train/v2/api/train_fn_utils.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

__all__ = ["RayReportCallback"]


class RayReportCallback(TrainerCallback):
    """Reports at each save and at the end, from all workers, as Ray wants it; rank 0 gives the folders.

    `upload=False` for an `output_dir` in Ray's own storage, with `run_config.storage_path/name`: nothing is copied then.
    """

    def __init__(self, upload: bool = True) -> None:
        self.upload = upload
        self._unreported: list[Path] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report what is complete; the one that is being written in the background comes with the next."""
        self._unreported.append(Path(args.output_dir, f"checkpoint-{state.global_step}"))
        self._report(args, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last log and checkpoint; the Trainer has waited for it."""
        self._report(args, state)

    def _report(self, args: Any, state: Any) -> None:
        from ray import train
        from ray.train import Checkpoint, CheckpointUploadMode

        newest = None
        if args.process_index == 0:
            ready = [path for path in self._unreported if path.is_dir()]  # named when it is complete
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
