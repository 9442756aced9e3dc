"""What the engine saves and restores: checkpoints, and the numbers of the training state that are equal on every rank."""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

import torch

from hf_dist.checkpoint import random_state, resume
from hf_dist.checkpoint.folder import folder_of
from hf_dist.checkpoint.model_files import ModelFiles, model_files
from hf_dist.checkpoint.residuals import sender_of
from hf_dist.checkpoint.save import CheckpointWriter, SaveRequest
from hf_dist.checkpoint.training_state import Stateful
from hf_dist.config import BatchSizes, DistConfig
from hf_dist.dist.collective_guard import every_rank
from hf_dist.log import warn_once
from hf_dist.optim.loss_scale import DynamicLossScaler
from hf_dist.optim.resume_hyperparams import load_schedule, saved_options
from hf_dist.optim.skipped import SkippedSteps


class EngineCheckpoints(Stateful):
    """The part of `Engine` that concerns checkpoints."""

    config: DistConfig
    batch: BatchSizes
    lr_scheduler: Any
    micro_steps: int

    @property
    def scaler(self) -> DynamicLossScaler | None:
        """The loss scale of fp16."""
        raise NotImplementedError

    @property
    def skips(self) -> SkippedSteps:
        """The skipped steps."""
        raise NotImplementedError

    @property
    def optimizer(self) -> Any:
        """The optimizer, or several as one object; None without any."""
        raise NotImplementedError

    def synchronize_replicas(self) -> None:
        """Synchronise replicas that train alone."""
        raise NotImplementedError

    @property
    def has_own_options(self) -> bool:
        """Whether the optimizer still has its own options, also after loading a checkpoint of another optimizer."""
        return self.fragments is not None and self.fragments.has_own_options

    @cached_property
    def writer(self) -> CheckpointWriter:
        """Writes this engine's checkpoints, in the background with `checkpoint.async_save`."""
        in_background = self.config.checkpoint.async_save
        if in_background and self.sharded.storage.uses_disk:
            warn_once(
                "checkpoint.async_save has no effect: states on disk are streamed into the checkpoint while training waits"
            )
            in_background = False
        return CheckpointWriter(self.mesh, in_background=in_background)

    def save_checkpoint(self, directory: str | os.PathLike[str]) -> None:
        """Write a checkpoint to `directory`: the model as a folder that `from_pretrained` loads, and the training state.

        Every rank calls it. Raises `CheckpointError`; an older checkpoint of that name stays until the new one is complete.
        Replicas that train alone are synchronised first. With `checkpoint.async_save`, writing continues in the background;
        `engine.writer.wait()` waits for it.
        """
        every_rank(self.mesh, "engine.save_checkpoint()")
        self.synchronize_replicas()
        self.sharded.take_writes()
        self.writer.save(
            self,
            SaveRequest(
                final=folder_of(directory, "engine.save_checkpoint()"),
                files=self.model_files(),
                facts={"step": self.global_steps, "layout": self.layout_facts()},
                own_values=random_state.capture(),
            ),
        )

    def load_checkpoint(self, directory: str | os.PathLike[str], *, weights_only: bool = False) -> None:
        """Restore a checkpoint of `save_checkpoint`, written with any number of ranks, ZeRO stage or precision.

        Replaces weights, optimizer state, schedule, loss scale, counters and random states, and abandons the current window.
        An optimizer of another kind than the saved one starts with empty state and its own options.

        Every rank calls it. Raises `CheckpointError` on every rank if a file is missing, damaged, or of another model.
        """
        every_rank(self.mesh, "engine.load_checkpoint()")
        found = folder_of(directory, "engine.load_checkpoint()")
        resume.load_whole_checkpoint(self, found, weights_only=weights_only)
        self.micro_steps = 0
        if not weights_only:
            resume.restore_random_state(self.mesh, found, seed=torch.initial_seed(), step=self.global_steps)

    @property
    def verifies_checkpoints(self) -> bool:
        """`checkpoint.verify`."""
        return self.config.checkpoint.verify

    def model_files(self) -> ModelFiles:
        """Describes how this model is written to disk."""
        return model_files(self.sharded, self.config.checkpoint.max_shard_size)

    def layout_facts(self) -> dict[str, object]:
        """Facts about the saving run, for human readers; a resume does not use them."""
        return {
            "world_size": self.mesh.world.size,
            "pipeline_stages": self.mesh.pp.size,
            "zero_stage": self.config.zero_optimization.stage,
            "precision": self.config.dtype,
            "micro_batch": self.batch.micro,
            "accumulation": self.batch.accumulation,
            "global_batch": self.batch.train,
        }

    def plain_state(self) -> dict[str, object]:
        """The numbers and strings of the training state, equal on every rank. Local."""
        optimizer = None
        if self.optimizer is not None and self.fragments is not None:
            optimizer = saved_options(self.optimizer, self.fragments.param_names)
        return {
            "optimizer": optimizer,
            "messages": sender_of(self.sharded),
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "lr_scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None,
            "counters": {"global_steps": self.global_steps, **self.skips.state_dict()},
            "outer": self.outer.plain_state() if self.outer is not None else {},
        }

    def load_plain_state(self, state: dict[str, Any]) -> None:
        """Restore `plain_state()`, except for the optimizer's options, restored earlier by `take_options`. Local."""
        if self.scaler:
            self.scaler.load_state_dict(state["scaler"] or self.scaler.initial_state)
        if self.lr_scheduler is not None and state["lr_scheduler"]:
            load_schedule(self.lr_scheduler, state["lr_scheduler"], own_options=self.has_own_options)
        self.global_steps = state["counters"]["global_steps"]
        self.skips.load_state_dict(state["counters"])
        if self.outer is not None:
            self.outer.load_plain_state(state.get("outer", {}))
