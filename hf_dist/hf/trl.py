"""What TRL's trainers do with models beside the one that is trained: measured, synchronised, or refused.

TRL hands reference and reward models to `accelerator.prepare_model(..., evaluation_mode=True)`, which shards them; the rest of
its places that look at the engine are quiet for ours. Source: trl 1.16, trainer/dpo_trainer.py, trainer/callbacks.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_dist.errors import ConfigError, Problem
from hf_dist.hf.accelerator import DistAccelerator
from hf_dist.sharding.full_params import gathered
from hf_dist.sharding.prepared import OWNER

_OVER_STAGES = {"SFTTrainer", "RewardTrainer"}
"""Trainers of TRL whose step is one forward and one backward of the trained model, as a pipeline needs it."""


class TrlMixin:
    """Part of `DistTrainerMixin`; nothing here is called by a Trainer that is not TRL's."""

    accelerator: Any
    model: Any
    dist: Any

    def create_accelerator_and_postprocess(self) -> None:
        """HF's, but not for trainers that do more than train one model when it is cut into stages."""
        names = [c.__name__ for c in type(self).__mro__ if c.__module__.startswith("trl.")]
        trainer = next((name for name in names if name.endswith("Trainer")), None)
        if self.dist is not None and self.dist.pipeline.stages > 1 and trainer not in (None, *_OVER_STAGES):
            raise ConfigError(
                Problem(
                    "pipeline.stages",
                    str(self.dist.pipeline.stages),
                    f"cannot be combined with {trainer}: its step generates, or asks a reference model",
                    'Use {"zero_optimization": {"stage": 3}} instead, with pipeline.stages 1.',
                )
            )
        super().create_accelerator_and_postprocess()  # type: ignore[misc]

    def compute_ref_log_probs(self, model: nn.Module, inputs: Any) -> Any:
        """TRL's; with `precompute_ref_log_probs` it comes before training, with a model that nobody has prepared."""
        if isinstance(self.accelerator, DistAccelerator) and self.accelerator.engine_of(model) is None:
            self.accelerator.prepare_model(model, evaluation_mode=True)
        return super().compute_ref_log_probs(model, inputs)  # type: ignore[misc]

    def add_callback(self, callback: Any) -> None:
        """HF's; TRL's callback that moves the reference model towards the policy gets a way to do so on shards."""
        super().add_callback(callback)  # type: ignore[misc]
        if isinstance(self.accelerator, DistAccelerator) and type(callback).__name__ == "SyncRefModelCallback":
            callback.sync_target_model = move_towards


@torch.no_grad()
def move_towards(model: nn.Module, reference: nn.Module, alpha: float) -> None:
    """`reference = (1 - alpha) * reference + alpha * model`, group by group. Both sharded; every rank calls it."""
    parts: dict[int, list[tuple[nn.Parameter, nn.Parameter]]] = {}
    for target, source in zip(reference.parameters(), model.parameters(), strict=True):
        parts.setdefault(id(getattr(target, OWNER)[0]()), []).append((target, source))
    for pairs in parts.values():
        with gathered([source for _, source in pairs]), gathered([target for target, _ in pairs], modifier_rank=0):
            for target, source in pairs:
                target.mul_(1.0 - alpha).add_(source.to(target.dtype), alpha=alpha)
