"""The Trainer's checkpoints: saved as one atomic folder, and found."""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer_callback import ExportableState

from hf_dist.checkpoint import folder, lock
from hf_dist.checkpoint.model_files import ModelFiles
from hf_dist.checkpoint.not_resumable import why_not
from hf_dist.checkpoint.publish import recover
from hf_dist.checkpoint.save import CheckpointWriter, SaveRequest
from hf_dist.checkpoint.training_state import whole_here
from hf_dist.checkpoint.unwritable import cause, remedy, try_to_write
from hf_dist.dist import collectives, excepthook
from hf_dist.dist.collective_guard import every_rank
from hf_dist.dist.raise_on_all_ranks import agree
from hf_dist.engine.engine import Engine
from hf_dist.errors import CheckpointError
from hf_dist.hf import resumed_arguments
from hf_dist.hf.accelerator import DistAccelerator
from hf_dist.hf.counts import whole_counts
from hf_dist.hf.data_position import DataPositionMixin
from hf_dist.hf.model_files import (
    trainer_files,
)
from hf_dist.hf.resumed_files import check_trainer_state
from hf_dist.hf.resuming import ResumingMixin, is_theirs
from hf_dist.hf.saving import keep_adapters
from hf_dist.hf.state_dict import full_state_dict
from hf_dist.hf.stop_signal import RESTART_CODE, StopSignal
from hf_dist.log import say
from hf_dist.sharding.ownership import shards_of

_SCHEDULER = "scheduler.pt"
_WRITTEN_SECONDS = 600.0
"""How long an interrupt waits for a checkpoint that is being written."""


class CheckpointingMixin(ResumingMixin, DataPositionMixin):
    """Overrides of the Trainer that save and find checkpoints; part of `DistTrainerMixin`."""

    lr_scheduler: Any
    optimizer: object
    callback_handler: Any
    _stop: StopSignal | None = None
    _saved_step = -1
    _working: tuple[Path, ModelFiles] | None = None

    @property
    def dist_engine(self) -> Engine | None:
        """The engine of the trained model; None until `train()` or `evaluate()` creates it."""
        if self.dist is None or not isinstance(self.accelerator, DistAccelerator):
            return None
        return self.accelerator.engine_of(self.model)

    @property
    def deepspeed(self) -> Any:
        """The engine if there is a config, otherwise the value that HF set.

        Many scripts end with `if trainer.deepspeed: trainer.save_model(folder)`, else call `state_dict()` on the main rank.
        HF itself checks `is_deepspeed_enabled` first, which is false.
        """
        return self.__dict__.get("deepspeed") if self.dist is None else self.dist_engine

    @deepspeed.setter
    def deepspeed(self, value: object) -> None:
        self.__dict__["deepspeed"] = value

    # ---------------------------------------------------------------------- find

    @contextmanager
    def _checkpoints_of_training(self, asked: str | bool | None, trial: object) -> Iterator[str | bool | None]:
        """Inside, a training owns its output folder and saves on signals. Gives what HF resumes from, found for `asked`."""
        writer = self._claim_output(trial)
        if self.dist is None:
            yield asked
            return
        found = self._find_checkpoint(asked) if asked else asked
        if self.dist.hf_dist.save_on_signal:
            self._stop = StopSignal(self.accelerator.mesh.control, functools.partial(_newest_in, writer.parent))
            self._stop.listen()
        self._saved_step = -1
        try:
            with whole_counts():
                yield found
            if self._stop is not None:
                self._stop.close()
            if self.dist_engine is not None:
                self.checkpoint_writer.wait()
            lock.release(writer)
        except KeyboardInterrupt as interrupt:
            self._note_what_is_saved(interrupt, writer.parent, found)
            raise
        finally:
            if self._stop is not None:
                self._stop.release()
            self._stop = None

    def _leave_evaluation_if_told(self) -> None:
        """An evaluation in a training may take longer than the grace period of a stop signal."""
        if self.is_in_train and self.accelerator.even_batches:  # type: ignore[attr-defined]
            self._leave_if_told(in_evaluation=True)

    def _leave_if_told(self, in_evaluation: bool = False) -> None:
        """If a rank received a stop signal, all ranks save and exit here."""
        number = self._told(in_evaluation)  # type: ignore[attr-defined]
        if not number:
            return
        step = self.state.global_step
        saved = "nothing new to save"
        if step > self._first_step:
            if step != self._saved_step:
                self._save_checkpoint(self.model, None)
                self.control = self.callback_handler.on_save(self.args, self.state, self.control)
            saved = f"saved as checkpoint-{step}"
        self.checkpoint_writer.wait()
        words = (
            f"{signal.Signals(number).name}: stopped after step {step}, {saved}; leaving with exit code {RESTART_CODE}. "
            'Started again with resume_from_checkpoint="auto" (--resume_from_checkpoint auto) the run continues.'
        )
        say(words)
        assert self._stop is not None
        self._stop.leave(f"hf_dist: {words}")
        raise SystemExit(RESTART_CODE)

    def _note_what_is_saved(self, interrupt: KeyboardInterrupt, run: Path, found: str | bool | None) -> None:
        """Add what was saved, and how to go on, to the traceback. `found`: resumed from. Local: any rank may be interrupted."""
        if self.dist_engine is not None:
            self.checkpoint_writer.join(_WRITTEN_SECONDS)
        newest, _ = folder.newest_complete(run)
        start = newest or found
        saved = "no checkpoint was saved" if newest is None else f"the newest checkpoint is {newest}"
        go_on = (
            f'with resume_from_checkpoint="{start}" the run continues from there'
            if start
            else "a new start begins at step 0. SIGTERM, unlike Ctrl-C, saves before the end"
        )
        excepthook.note_on(interrupt, f"interrupted after step {self.state.global_step}; {saved}; {go_on}.")

    def _claim_output(self, trial: object) -> Path:
        """Have no second job write in this run's folder while it trains. Collective. Returns the file that says so."""
        writer = Path(self._get_output_dir(trial=trial)) / lock.OUTPUT  # type: ignore[attr-defined]
        if self.dist is None or self.args.save_strategy == "no":
            return writer
        problem = None
        if self.accelerator.mesh.world.rank == 0:
            try:
                lock.claim(writer)
            except CheckpointError as error:
                problem = str(error)
            wrong = None if problem else try_to_write(writer.parent)
            if wrong is not None:
                problem = (
                    f"{writer.parent}: no checkpoint can be written here: {cause(wrong, writer.parent)}. {remedy(wrong)} "
                    'save_strategy="no" trains without checkpoints.'
                )
        agree(self.accelerator.mesh.world, problem, CheckpointError)
        return writer

    def _find_checkpoint(self, wanted: str | bool) -> str | None:
        """The folder to resume from, equal on every rank. Collective."""
        root = Path(self.args.output_dir)
        found: str | None = None
        problem: str | None = None
        if self.accelerator.mesh.world.rank == 0:
            recover(root)
            if wanted is not True and wanted != "auto":
                found = str(wanted)
            else:
                newest, skipped = folder.newest_complete(root)
                found = None if newest is None else str(newest)
                for line in skipped:
                    say(f"{root}: {line}; an older checkpoint is used")
                if newest is not None and (rolled := folder.higher(root, newest)):
                    say(f"{root}: {', '.join(rolled)} were written before {newest.name}, by a run that was rolled back")
                if wanted == "auto":
                    say(
                        f"resuming from {found}, written {_when(Path(found))}"
                        if found
                        else f"no checkpoint in {root}: starting from the beginning"
                    )
                elif found is None:
                    problem = f"No valid checkpoint found in output directory ({root})"
            if found is not None:
                problem = why_not(Path(found), loads_itself=is_theirs(super()._load_from_checkpoint))
                try:
                    check_trainer_state(Path(found))
                except CheckpointError as error:
                    problem = str(error)
        found, problem = collectives.all_gather_object(self.accelerator.mesh.world, (found, problem))[0]
        if problem is not None:
            raise CheckpointError(problem)
        return found

    # ---------------------------------------------------------------------- save

    @property
    def checkpoint_writer(self) -> CheckpointWriter:
        """Writes this run's checkpoints. `checkpoint_writer.wait()` waits for a background save."""
        engine = self.dist_engine
        assert engine is not None, "made by train() or evaluate()"
        return engine.writer

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """Write `checkpoint-N`: a complete HF folder and the training state. It gets this name only when it is complete."""
        engine = self.dist_engine
        if engine is None:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            return
        engine.synchronize_replicas()  # with a server, a signal may come between two meetings
        if self.hp_search_backend is None and trial is None:  # type: ignore[attr-defined]
            self.store_flos()  # type: ignore[attr-defined]
        run = Path(self._get_output_dir(trial=trial))  # type: ignore[attr-defined]
        final = run / f"checkpoint-{self.state.global_step}"
        self._note_best(run, final)
        self._saved_step = self.state.global_step
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint

        def more_files(working: Path) -> None:
            if another := lock.taken_over(run / lock.OUTPUT):
                raise CheckpointError(another)
            if not self.args.save_only_model:
                torch.save(self.lr_scheduler.state_dict(), working / _SCHEDULER)
            self._write_trainer_state(working)

        def after(final: Path) -> None:
            if self.args.push_to_hub:
                self._push_from_checkpoint(str(final))  # type: ignore[attr-defined]
            folder.rotate(run, limit, keep=[Path(best)] if best else [])

        files = trainer_files(self, engine)

        def save_model(working: Path) -> None:
            self._working = (working, files)
            try:
                self.save_model(str(working), _internal_call=True)
            finally:
                self._working = None

        self.checkpoint_writer.save(
            engine,
            SaveRequest(
                final=final,
                files=replace(files, write_small_files=lambda _: None),
                write_more_files=more_files,
                on_every_rank=save_model,
                facts={
                    "step": self.state.global_step,
                    "layout": engine.layout_facts(),
                    "arguments": resumed_arguments.record(self.args),
                    "position": self._data_position(),
                    "evaluation_is_due": self._before_evaluation is not None,
                },
                own_values=self._own_values(),
                training_state=not self.args.save_only_model,
                after=after,
            ),
        )

    def _note_best(self, run: Path, final: Path) -> None:
        if self.args.save_strategy == "no" or not self.state.best_global_step:
            return
        best = run / f"checkpoint-{self.state.best_global_step}"
        if best == final or best.exists():
            self.state.best_model_checkpoint = str(best)

    def _write_trainer_state(self, working: Path) -> None:
        """Like HF's: callbacks that export a state store it in the trainer state."""
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, value = type(callback).__name__, callback.state()
                known = self.state.stateful_callbacks.get(name)
                if isinstance(known, list):
                    known.append(value)
                else:
                    self.state.stateful_callbacks[name] = value
        self.state.save_to_json(str(working / "trainer_state.json"))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder that `from_pretrained` loads, at every ZeRO stage. Collective; rank 0 alone if it holds all weights.

        `_save_checkpoint` calls it as HF's does, so that overrides run, with the folder that becomes `checkpoint-N`. It writes
        the weights with the other files, after this method returns.
        """
        engine = self.dist_engine
        target = Path(self.args.output_dir if output_dir is None else output_dir)
        if engine is None:
            sharded = None if self.dist is None else shards_of(self.model)
            if sharded is None:
                super().save_model(output_dir, _internal_call)  # type: ignore[misc]
                return
            # Another Trainer owns the model now, so its shards hold the weights.
            state = full_state_dict(sharded, keep=self.args.should_save)
            if self.args.should_save:
                self._save(str(target), state_dict=state)  # type: ignore[attr-defined]
            return
        if self._working is not None and target == self._working[0]:
            if self.accelerator.mesh.world.rank == 0:
                self._working[1].write_small_files(target)
            return
        if engine.outer is None and whole_here(engine.sharded):
            self.checkpoint_writer.save_model_here(engine, target, lambda: trainer_files(self, engine, alone=True))
        else:
            every_rank(engine.mesh, "trainer.save_model()")
            files = trainer_files(self, engine)
            engine.synchronize_replicas()
            self.checkpoint_writer.save_model(engine, target, files)
            keep_adapters(engine)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")  # type: ignore[attr-defined]

    # ----------------------------------------------------------------------- end

    def _finalize_training(self, *args: object, **kwargs: object) -> object:
        """HF's, after a last check for a stop signal and after all saves: HF deletes the checkpoints beyond a limit of one."""
        if self._evaluation_due is not None:  # due after the last step: no epoch has restored the generators
            self._load_rng_state(str(self._evaluation_due))
        if self._stop is not None:
            self._leave_if_told()
            self._leave_if_told()  # completes the previous check, and covers signals received since
        if self.dist_engine is not None:
            self.checkpoint_writer.wait()
            self._forget_a_best_that_is_gone()
            so_far = getattr(self, "_tr_loss", None)  # where this transformers keeps it
            if so_far is not None:  # of the steps since the last log: HF adds this rank's to those of all ranks
                self._tr_loss = so_far.clone()
                collectives.all_reduce(self.accelerator.mesh.dp, self._tr_loss).wait()
        result = super()._finalize_training(*args, **kwargs)  # type: ignore[misc]
        if self.dist_engine is not None:
            self.dist_engine.sharded.finish_gathers()
        return result

    def _forget_a_best_that_is_gone(self) -> None:
        """A finished training keeps its last weights where somebody has removed the best checkpoint; HF raises. Collective."""
        best = self.state.best_model_checkpoint
        here = best is None or Path(best).is_dir()
        if collectives.all_gather_object(self.accelerator.mesh.world, here)[0]:
            return
        self.state.best_model_checkpoint = None
        what = (
            "the weights of the last step are kept"
            if self.args.load_best_model_at_end
            else "training is done all the same"
        )
        say(f"the best checkpoint {best} is gone: {what}")


def _when(checkpoint: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(folder.written_at(checkpoint)))


def _newest_in(root: Path) -> str:
    newest, _ = folder.newest_complete(root)
    return "" if newest is None else newest.name
