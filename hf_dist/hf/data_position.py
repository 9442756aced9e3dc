"""Where a run stands in its data and random streams: recorded in each checkpoint, sought again by a resume."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import has_length

from hf_dist.checkpoint import folder, random_state, resume
from hf_dist.checkpoint.training_state import read_rank_values
from hf_dist.errors import CheckpointError
from hf_dist.hf import resumed_arguments
from hf_dist.hf.data import SeekableBatches, as_tensors, seekable_of
from hf_dist.hf.resumed_files import named_if_refused
from hf_dist.hf.streams.in_checkpoint import (
    LANES,
    ROWS_FILE,
    log_rows,
    nothing_skipped,
    place_facts,
    read_position,
    states_of_lanes,
)
from hf_dist.hf.streams.loader import Position, StreamBatches, StreamLoader, stream_of
from hf_dist.log import say_once


class DataPositionMixin:
    """Overrides of the Trainer that keep random states and the position in the data; part of `CheckpointingMixin`."""

    args: Any
    model: Any
    state: Any
    accelerator: Any
    control: Any
    dist: Any
    _tr_loss: Any
    _before_window: tuple[int, dict[str, object] | None] = (-1, None)
    _before_evaluation: dict[str, object] | None = None
    _evaluation_due: Path | None = None
    _batches: SeekableBatches | StreamBatches | None = None
    _stream: StreamLoader | None = None
    """The loader of this epoch, of data without an index."""
    _before_rows: tuple[int, Position | None] = (-1, None)
    """The step, and where its window began in the stream."""
    _epoch: tuple[int, int, int] = (0, 0, 0)
    """Its number; the steps of the run and the batches of this rank before the first one that is drawn of it."""
    _length: int | None = 0
    """Batches of an epoch on this rank; None for data without a length, where HF takes an epoch for as long as the run."""
    _first_step = 0
    """Steps that were done when this training began."""
    _counts_steps = True
    """Whether the steps so far were as large as those to come, so that their number tells how many are left."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """HF's, but keeps random states and position before each window, for a save in the middle of it."""
        if self.dist is not None:
            self._before_window = (self.state.global_step, self._raw_states())
        if self._stream is None:
            return super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        before = self._stream.position()
        self._before_rows = (self.state.global_step, before)
        window, items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        if not window:  # HF asks for each window that would be left
            self.control.should_epoch_stop = True
        elif self.dist.hf_dist.log_rows and self.accelerator.mesh.world.rank == 0:
            place = self._stream.place
            assert place is not None
            step, epoch = self.state.global_step + 1, self._stream.iteration
            log_rows(Path(self.args.output_dir) / ROWS_FILE, step, before, Position(epoch, place))
        return window, items

    def get_train_dataloader(self) -> Any:
        """HF's; of a dataset without an index one that streams."""
        if self.dist is None:
            return super().get_train_dataloader()  # type: ignore[misc]
        self.accelerator.stream_microbatches = self.args.gradient_accumulation_steps
        try:
            return super().get_train_dataloader()  # type: ignore[misc]
        finally:
            self.accelerator.stream_microbatches = None

    def _rows_done(self) -> Position | None:
        """Where the stream stood after the last step that was made."""
        step, before = self._before_rows
        if self._stream is None or step == self.state.global_step:
            return before if self._stream is not None else None
        return self._stream.position()

    def _save_rng_state(self, output_dir: str) -> None:
        """Nothing to do under a config: the training state holds the random state of each rank."""
        if self.dist is None:
            super()._save_rng_state(output_dir)  # type: ignore[misc]

    def _evaluate(self, *args: object, **kwargs: object) -> Any:
        """HF's, but keeps the random states from before: a run stopped in an evaluation resumes with the whole evaluation."""
        self._before_evaluation = self._raw_states() if self.dist is not None else None
        try:
            return super()._evaluate(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._before_evaluation = None

    def _evaluate_if_due(self) -> None:
        """Run the evaluation that the stop interrupted, between two steps as before, and the save that follows it."""
        if self._evaluation_due is None:
            return
        self._evaluation_due = None
        self.control.should_evaluate = self.control.should_save = True
        self.control.should_log = False
        self._maybe_log_save_evaluate(  # type: ignore[attr-defined]
            self._tr_loss,
            None,
            self.model,
            None,
            self.state.epoch,
            None,
            time.time(),
        )
        self.control.should_evaluate = self.control.should_save = False

    def _own_values(self) -> dict[str, torch.Tensor]:
        return {**self._own_random_states(), **self._own_lanes()}

    def _own_lanes(self) -> dict[str, torch.Tensor]:
        position, mesh = self._rows_done(), self.accelerator.mesh
        if self._stream is None or position is None or resume.draws_like(mesh) != mesh.world.rank:
            return {}
        return states_of_lanes(self._stream, position)

    def _own_random_states(self) -> dict[str, torch.Tensor]:
        if self._before_evaluation is not None:
            return as_tensors(self._before_evaluation)
        step, before = self._before_window
        # After a step the window is consumed, and the generators are where the next window begins.
        return as_tensors(before if step == self.state.global_step and before is not None else self._raw_states())

    def _raw_states(self) -> dict[str, object]:
        return {"": random_state.raw(), **(self._batches.states() if self._batches is not None else {})}

    def _data_position(self) -> dict[str, object]:
        """Epoch, and the number of its samples consumed over all ranks. HF records steps, whose size may change."""
        per_batch = resumed_arguments.rows_per_batch(self.args)
        position = self._rows_done()
        if position is not None:
            done = {"epoch": position.epoch, "samples": position.place.sum, "sized": self._length is not None}
            return {**done, LANES: place_facts(position, self.accelerator.num_processes)}
        if self._length is None:
            epoch, steps, batches = self._epoch
            batches += (self.state.global_step - steps) * self.args.gradient_accumulation_steps
            return {"epoch": epoch, "samples": batches * per_batch, "sized": False}
        whole, part = divmod(self.state.epoch or 0.0, 1.0)
        return {"epoch": int(whole), "samples": round(part * self._length) * per_batch, "sized": True}

    def _init_training_state(self, *args: object, **kwargs: Any) -> tuple[int, int]:
        """HF's, which derives the position from the number of steps.

        After a change of the global batch the samples give it, and of data without a length they always do.
        """
        self._counts_steps = True
        epochs, batches = super()._init_training_state(*args, **kwargs)  # type: ignore[misc]
        self._first_step = self.state.global_step
        checkpoint = kwargs.get("resume_from_checkpoint", args[3] if len(args) > 3 else None)
        manifest = folder.read_manifest(Path(checkpoint)) if self.dist is not None and checkpoint else None
        if manifest is None or "position" not in manifest or self.args.ignore_data_skip:
            return epochs, batches
        position = _position_of(Path(str(checkpoint)), manifest)
        now = resumed_arguments.record(self.args)["global_batch"]
        if manifest.get("arguments", {}).get("global_batch") == now and position.get("sized", True):
            return epochs, batches
        self._counts_steps = self.args.max_steps > 0
        windows, again = divmod(position["samples"], now)
        if again and LANES not in position:
            say_once(f"a step has {now} samples now: the last {again} before the checkpoint will be read again")
        return position["epoch"], windows * self.args.gradient_accumulation_steps

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Skipped if the batches already restored it, between collating the first and second batch of the resumed epoch."""
        if self.dist is None or checkpoint is None or not (Path(checkpoint) / folder.STATE).is_dir():
            with named_if_refused(Path(checkpoint or "")):
                super()._load_rng_state(checkpoint)  # type: ignore[misc]
        elif self._batches is None or not self._batches.restored:
            mesh = self.accelerator.mesh
            resume.restore_random_state(mesh, Path(checkpoint), seed=self.args.seed, step=self.state.global_step)
            self._evaluate_if_due()

    def _run_epoch(self, *args: object, **kwargs: Any) -> None:
        """HF's, but seeks the first batch of a resumed epoch instead of drawing and discarding the batches before it.

        A run that had made all of its steps makes no other one, which HF's loop would: it counts after a step.
        """
        if self.dist is not None and self._counts_steps and self.state.global_step >= self.state.max_steps:
            say_once(
                f"all {self.state.max_steps} steps were made before this start: nothing is left to train. For more steps, set "
                "max_steps or num_train_epochs higher."
            )
            self.control.should_training_stop = True
            return
        loader = kwargs.get("train_dataloader")
        self._batches, self._stream = seekable_of(loader), stream_of(loader)
        if self._stream is not None:
            self._run_epoch_of_stream(*args, **kwargs)
            return
        if self.dist is not None and self._batches is not None:
            self._batches.set_epoch(
                kwargs["epoch"]
            )  # older accelerate versions do not pass the epoch on below `SkipBatchSampler`
        skip, checkpoint = kwargs.get("steps_trained_in_current_epoch"), kwargs.get("resume_from_checkpoint")
        in_resumed_epoch = checkpoint and skip and kwargs.get("epoch") == kwargs.get("epochs_trained")
        skips = in_resumed_epoch and not self.args.ignore_data_skip
        self._note_epoch(kwargs, int(skip or 0) if skips else 0)
        if self.dist is not None and self._batches is not None and skips:
            state = Path(str(checkpoint)) / folder.STATE
            values = read_rank_values(state, resume.draws_like(self.accelerator.mesh)) if state.is_dir() else None
            self._batches.seek(int(skip or 0), values or None, self._evaluate_if_due)
        super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def _run_epoch_of_stream(self, *args: object, **kwargs: Any) -> None:
        """HF's, on a stream that begins at the row of the checkpoint."""
        assert self._stream is not None
        stream, checkpoint = self._stream, kwargs.get("resume_from_checkpoint")
        self._batches, self._before_rows = stream.batches, (-1, None)
        is_resumed = checkpoint and kwargs.get("epoch") == kwargs.get("epochs_trained")
        skipped = 0
        if is_resumed and not self.args.ignore_data_skip and (Path(str(checkpoint)) / folder.MANIFEST).is_file():
            skipped = int(kwargs.get("steps_trained_in_current_epoch") or 0)
            state = Path(str(checkpoint)) / folder.STATE
            values = read_rank_values(state, resume.draws_like(self.accelerator.mesh)) if state.is_dir() else {}
            position = read_position(Path(str(checkpoint)), stream, values)
            asked, number = self.dist.hf_dist.data_lanes, len(position.place.rows)
            if asked not in (None, number):
                say_once(f"hf_dist.data_lanes {asked} has no effect: the checkpoint's stream has {number} lanes")
            if not position.is_beginning:
                stream.begin_at(position)
                if values and position.place.sum:
                    stream.batches.restore_random(values, self._evaluate_if_due)
        self._note_epoch(kwargs, skipped)
        with nothing_skipped():
            super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def _note_epoch(self, arguments: dict[str, Any], skipped: int) -> None:
        """Note where an epoch begins. Of data without a length it has steps for the rest of the run, whatever was skipped."""
        loader, accumulation = arguments["train_dataloader"], self.args.gradient_accumulation_steps
        self._epoch = (arguments["epoch"], self.state.global_step, skipped)
        self._length = len(loader) if has_length(loader) else None
        windows = skipped // accumulation + self.state.max_steps - self.state.global_step
        if self.dist is not None and self._length is None and windows > arguments["num_update_steps_per_epoch"]:
            arguments |= {"num_update_steps_per_epoch": windows, "steps_in_epoch": windows * accumulation}


def _position_of(directory: Path, manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `_data_position` has written. Raises `CheckpointError` if it is something else."""
    position: Mapping[str, Any] = manifest["position"]
    for name in ("epoch", "samples"):
        if type(position.get(name)) is not int or position[name] < 0:
            raise CheckpointError(
                f"{directory / folder.MANIFEST} cannot be read: its position has {name} {position.get(name)!r}, no number "
                "of them. With ignore_data_skip=True the data start anew."
            )
    return position
