"""The Trainer's resumption: weights, optimizer and schedule of a checkpoint, on any layout; other programs' as far as known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from hf_dist.checkpoint import folder, foreign, resume
from hf_dist.checkpoint.check_names import refuse_missing, refuse_unknown
from hf_dist.checkpoint.weight_plan import WeightPlan
from hf_dist.dist.raise_on_all_ranks import agree
from hf_dist.engine.engine import Engine
from hf_dist.errors import CheckpointError
from hf_dist.hf import resumed_arguments
from hf_dist.hf.model_files import load_weights, plan_of_files, read_plan
from hf_dist.hf.resumed_files import named_if_refused, read_schedule
from hf_dist.hf.state_dict import loading, loads_by_itself
from hf_dist.log import say
from hf_dist.optim.resume_hyperparams import load_schedule

__all__ = ["ResumingMixin", "is_theirs"]

_SCHEDULER = "scheduler.pt"


class ResumingMixin:
    """Overrides of the Trainer that load checkpoints; part of `DistTrainerMixin`."""

    args: Any
    dist: Any
    state: Any
    lr_scheduler: object
    _evaluation_due: Path | None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a checkpoint. Before sharding nothing is read: each rank reads its part once it has its shard."""
        directory = Path(resume_from_checkpoint)
        program = foreign.program_of(directory)
        unknown = read_plan(directory) is None and program is None
        theirs = is_theirs(super()._load_from_checkpoint)  # type: ignore[misc]
        engine: Engine | None = self.dist_engine  # type: ignore[attr-defined]
        if self.dist is None or theirs or (engine is None and unknown):
            given = () if model is None else (model,)  # sentence-transformers' override takes no model
            with named_if_refused(directory):
                super()._load_from_checkpoint(resume_from_checkpoint, *given)  # type: ignore[misc]
        elif engine is not None:
            self._restore_weights(directory)

    def _restore_weights(self, directory: Path, names: set[str] | None = None) -> None:
        engine: Engine | None = self.dist_engine  # type: ignore[attr-defined]
        assert engine is not None
        plan = read_plan(directory)
        if not loads_by_itself(engine):
            plan = plan if plan is not None else self._plan_of_files(engine, directory)
            if plan is not None:
                load_weights(engine, directory, plan, names)
                return
        # Of another program: HF and PEFT know the names, or the model loads them itself.
        with named_if_refused(directory), loading(engine.sharded):
            super()._load_from_checkpoint(str(directory))  # type: ignore[misc]

    def _plan_of_files(self, engine: Engine, directory: Path) -> WeightPlan | None:
        """The weights of another program's folder, if each rank can read its part; equal on all ranks. Collective."""
        plan, problem = None, None
        try:
            plan = plan_of_files(engine, directory)
        except CheckpointError as error:
            problem = str(error)
        agree(engine.mesh.world, problem, CheckpointError)
        return plan

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """HF's; on a prepared model, names that do not fit are an error: what was not read would train on from its start."""
        engine: Engine | None = self.dist_engine  # type: ignore[attr-defined]
        if engine is not None and not hasattr(engine.model, "peft_config"):
            folder = Path("the checkpoint")
            refuse_missing(engine.sharded.whole, load_result.missing_keys, folder)
            refuse_unknown(engine.sharded.whole, load_result.unexpected_keys, folder)
        super()._issue_warnings_after_load(load_result)  # type: ignore[misc]

    def _load_scaler(self, checkpoint: str | None) -> None:
        """HF's, for accelerate's scaler. Ours is in the training state, and a file of another run is not read."""
        if self.dist_engine is None:  # type: ignore[attr-defined]
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        engine: Engine | None = self.dist_engine  # type: ignore[attr-defined]
        if engine is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        directory = Path(checkpoint)
        if not (directory / folder.STATE).is_dir():
            program = foreign.program_of(directory)
            if read_plan(directory) is None and program is not None:
                self._import_foreign(engine, directory, program)
                return
            engine.zero_grad()
            self._restore_weights(directory)
            if engine.fragments is not None:
                engine.fragments.start_anew()
            say(f"{directory} holds no training state: its weights are loaded, the optimizer starts with empty state")
            return
        manifest = folder.read_manifest(directory) or {}
        say(f"resumes after step {self.state.global_step} of {self.state.max_steps}")
        if manifest.get(folder.NOT_FINITE):
            say(
                f"{directory}: its weights are not finite, first {manifest[folder.NOT_FINITE]}: resume from an older one"
            )
        self._evaluation_due = directory if manifest.get("evaluation_is_due") else None
        if loads_by_itself(engine):
            self._restore_weights(directory)
        resume.load_whole_checkpoint(engine, directory)
        saved, now = manifest.get("arguments", {}), resumed_arguments.record(self.args)
        for line in resumed_arguments.changes(saved, now, same_optimizer=not engine.has_own_options):
            say(f"resumed with another argument: {line}")
        scheduler = directory / _SCHEDULER
        if scheduler.is_file():
            load_schedule(self.lr_scheduler, read_schedule(scheduler), own_options=engine.has_own_options)

    def _import_foreign(self, engine: Engine, directory: Path, program: str) -> None:
        """Import as much as possible from a checkpoint of another program, and report it in one line. Collective."""
        imported = foreign.load_foreign(engine, directory, program)
        if not imported.weights:
            self._restore_weights(directory)
        states = f"optimizer state of {imported.states}" if imported.states else "optimizer state"
        taken = ["weights", *([states] if imported.optimizer else [])]
        scheduler = directory / _SCHEDULER
        if scheduler.is_file():
            schedule = read_schedule(scheduler)
            # A schedule's state does not set the rates, and the rates of the param groups may not have been read.
            load_schedule(self.lr_scheduler, schedule, own_options=True)
            taken.append("schedule")
        engine.global_steps = self.state.global_step
        left = f"; not taken: {'; '.join(imported.notes)}" if imported.notes else ""
        say(f"{directory} was written by {imported.program}; taken: {', '.join(taken)}{left}")

    def _load_best_model(self) -> None:
        """Load the fp32 master weights of the best checkpoint, or its HF weights if it has no master weights."""
        engine: Engine | None = self.dist_engine  # type: ignore[attr-defined]
        if engine is None:
            super()._load_best_model()  # type: ignore[misc]
            return
        self.checkpoint_writer.wait()  # type: ignore[attr-defined]
        if is_theirs(super()._load_best_model):  # type: ignore[misc]
            super()._load_best_model()  # type: ignore[misc]
            return
        best = Path(self.state.best_model_checkpoint)
        has_state = (best / folder.STATE).is_dir()
        if not has_state or loads_by_itself(engine):
            self._restore_weights(best)
        if has_state:
            resume.load_whole_checkpoint(engine, best, weights_only=True)


def is_theirs(method: object) -> bool:
    """Whether the next class's method is an override, of a library or a user, and not HF's."""
    return bool(method.__module__ != "transformers.trainer")
