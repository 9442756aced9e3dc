"""`save_state`, `load_state` and `save_model` of a custom accelerate loop: the same folders as the Trainer's.

A state folder is an HF model folder that contains the training state, plus accelerate's own small files under
accelerate's names: `scheduler.bin`, `scheduler_1.bin`, ..., `custom_checkpoint_0.pkl`, ... and `dl_state_dict.bin`, ...
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_dist.checkpoint import folder, random_state
from hf_dist.checkpoint.model_files import model_files
from hf_dist.checkpoint.publish import recover
from hf_dist.checkpoint.save import SaveRequest
from hf_dist.dist import collectives
from hf_dist.dist.collective_guard import every_rank
from hf_dist.dist.mesh import ParallelMesh
from hf_dist.dist.raise_on_all_ranks import agree
from hf_dist.engine.engine import Engine
from hf_dist.errors import CheckpointError, ModelError
from hf_dist.hf.plain_files import plain_file
from hf_dist.hf.stateful_loaders import load_states_of_loaders, states_of_loaders, write_states_of_loaders
from hf_dist.log import say, warn_once
from hf_dist.optim.resume_hyperparams import load_schedule

_CUSTOM = re.compile(r"^custom_checkpoint_(\d+)\.pkl$")


class LoopCheckpointsMixin:
    """Overrides of accelerate's `Accelerator`; part of `DistAccelerator`."""

    engines: list[Engine]
    step: int
    project_configuration: Any
    _models: list[nn.Module]
    _schedulers: list[Any]
    _custom_objects: list[Any]

    @property
    def mesh(self) -> ParallelMesh:
        """Axes and process groups."""
        raise NotImplementedError

    @property
    def engine(self) -> Engine:
        """The engine of the trained model."""
        raise NotImplementedError

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **kwargs: object
    ) -> str:
        """Write the prepared model, optimizer, schedulers, registered objects and random states. Every rank calls it.

        Without `output_dir`, `ProjectConfiguration(automatic_checkpoint_naming=True)` names the folder
        `checkpoints/checkpoint_N` and keeps the last `total_limit` of them. Models prepared for evaluation are left out.
        Without a trained model it is accelerate's own call.
        Returns the folder; with `checkpoint.async_save` it gets its name only when `engine.writer.wait()` returns. Raises
        `CheckpointError` on every rank, `ValueError` where accelerate does.
        """
        if not safe_serialization:
            warn_once("save_state: safe_serialization=False has no effect, weights are written as safetensors")
        if len(self.engines) > 1:
            raise ModelError(
                f"save_state holds one trained model, and {len(self.engines)} were prepared. Save each with "
                "save_model, or give each its own DistAccelerator."
            )
        if not self.engines:  # loaders, schedulers and registered objects alone
            return str(super().save_state(output_dir, safe_serialization, **kwargs))  # type: ignore[misc]
        every_rank(self.mesh, "accelerator.save_state()")
        project = self.project_configuration
        final = self._state_folder(output_dir)

        def hooks(working: Path) -> None:
            for hook in self._save_model_state_pre_hook.values():  # type: ignore[attr-defined]
                hook(self._models, [{} for _ in self._models], str(working))

        def after(final: Path) -> None:
            if project.automatic_checkpoint_naming:
                folder.rotate(final.parent, project.total_limit, keep=[final], separator="_")

        self.engine.synchronize_replicas()
        positions = states_of_loaders(self)

        def write(working: Path) -> None:
            self._write_small_states(working)
            write_states_of_loaders(positions, working)

        self.engine.writer.save(
            self.engine,
            SaveRequest(
                final=final,
                files=self.engine.model_files(),
                write_more_files=write,
                on_every_rank=hooks,
                facts={"step": self.step, "layout": self.engine.layout_facts()},
                own_values=random_state.capture(),
                after=after,
            ),
        )
        project.iteration += 1
        return str(final)

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: object = None, **kwargs: object
    ) -> None:
        """Restore what `save_state` wrote, on any number of ranks and at any ZeRO stage. Every rank calls it.

        Without `input_dir`, automatic naming finds the newest complete folder, and the next save gets the next number.
        Raises `CheckpointError` on every rank, `ValueError` if there is no such folder.
        """
        if not self.engines:
            super().load_state(input_dir, load_kwargs, **kwargs)  # type: ignore[misc]
            return
        every_rank(self.mesh, "accelerator.load_state()")
        directory = self._found_folder(input_dir)
        for hook in self._load_model_state_pre_hook.values():  # type: ignore[attr-defined]
            hook(list(self._models), str(directory))
        self.engine.load_checkpoint(directory)
        problem = None
        try:
            self._read_small_states(directory)
            load_states_of_loaders(self, directory)
        except CheckpointError as error:
            problem = str(error)
        agree(self.mesh.world, problem, CheckpointError)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a folder that `from_pretrained` loads; all ranks write. Every rank calls it. Raises `CheckpointError`."""
        engine = self.engine_of(model)  # type: ignore[attr-defined]
        if engine is None:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)  # type: ignore[misc]
            return
        if not safe_serialization:
            warn_once("save_model: safe_serialization=False has no effect, weights are written as safetensors")
        every_rank(self.mesh, "accelerator.save_model()")
        engine.synchronize_replicas()
        engine.writer.save_model(engine, Path(save_directory), model_files(engine.sharded, max_shard_size))

    # ------------------------------------------------------------------- folders

    def _automatic_root(self) -> Path:
        return Path(self.project_configuration.project_dir) / "checkpoints"

    def _state_folder(self, output_dir: str | os.PathLike[str] | None) -> Path:
        project = self.project_configuration
        if not project.automatic_checkpoint_naming:
            if output_dir is None:
                raise ValueError(
                    "save_state needs output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)"
                )
            return folder.folder_of(output_dir, "accelerator.save_state()")
        final = self._automatic_root() / f"checkpoint_{project.iteration}"
        exists = collectives.all_gather_object(self.mesh.world, final.exists())[0]
        if exists:
            raise ValueError(
                f"{final} already exists. load_state() continues the numbering; or set "
                "accelerator.project_configuration.iteration to the number to start with."
            )
        return final

    def _found_folder(self, input_dir: str | os.PathLike[str] | None) -> Path:
        self.engine.writer.wait()
        if input_dir is not None:
            return Path(input_dir).expanduser()
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state needs input_dir, or ProjectConfiguration(automatic_checkpoint_naming=True)")
        root, found = self._automatic_root(), None
        if self.mesh.world.rank == 0:
            recover(root)
            found, skipped = folder.newest_complete(root)
            for line in skipped:
                say(f"{root}: {line}; an older state is used")
        found = collectives.all_gather_object(self.mesh.world, found)[0]
        if found is None:
            raise ValueError(f"there is no complete state in {root}")
        self.project_configuration.iteration = int(found.name.rpartition("_")[2]) + 1
        return found

    # -------------------------------------------------------------- small states

    def _write_small_states(self, working: Path) -> None:
        for index, scheduler in enumerate(self._schedulers):
            torch.save(scheduler.state_dict(), working / _scheduler_name(index))
        for index, obj in enumerate(self._custom_objects):
            torch.save(obj.state_dict(), working / f"custom_checkpoint_{index}.pkl")

    def _read_small_states(self, directory: Path) -> None:
        manifest = folder.read_manifest(directory) or {}
        self.step = manifest.get("step", self.step)
        for index, scheduler in enumerate(self._schedulers):
            load_schedule(
                scheduler, plain_file(directory / _scheduler_name(index)), own_options=self.engine.has_own_options
            )
        saved, registered = sum(bool(_CUSTOM.match(p.name)) for p in directory.iterdir()), len(self._custom_objects)
        if saved != registered:
            raise CheckpointError(
                f"{directory} holds {saved} registered objects, {registered} are registered now: call "
                "register_for_checkpointing with the same objects, in the same order, before load_state"
            )
        for index, obj in enumerate(self._custom_objects):
            obj.load_state_dict(plain_file(directory / f"custom_checkpoint_{index}.pkl"))


def _scheduler_name(index: int) -> str:
    return f"scheduler_{index}.bin" if index else "scheduler.bin"
