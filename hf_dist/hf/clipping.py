"""Clipping as accelerate's loops ask for it: by norm or by value, of the gradients that a list of parameters means."""

from __future__ import annotations

import torch

from hf_dist.config import DistConfig
from hf_dist.engine.engine import Engine
from hf_dist.engine.window import joint_clip
from hf_dist.errors import ConfigError, Problem
from hf_dist.hf.params_to_engine import listed_gradients
from hf_dist.hf.training_loop import TrainingLoop


class ClippingMixin:
    """The part of `DistAccelerator` that clips."""

    engines: list[Engine]
    dist_config: DistConfig
    around: TrainingLoop

    def clip_grad_norm_(self, parameters: object, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Global norm of the gradients of `parameters` before clipping; equal on every rank.

        `parameters` may span several models, be part of one model, or be tensors of an optimizer's param groups, as in torch.
        """
        if (own := self._own_clipping()) not in (0.0, float(max_norm)) and max_norm != float("inf"):
            raise ConfigError(
                Problem(
                    "gradient_clipping",
                    str(own),
                    f"differs from max_norm={max_norm} in accelerator.clip_grad_norm_",
                    'Set it to "auto", or change the script.',
                )
            )
        listed = listed_gradients(self.engines, parameters)
        return joint_clip(listed.windows, float(max_norm), listed.plain, float(norm_type))

    def _own_clipping(self) -> float:
        """`gradient_clipping` of the JSON in a custom loop, 0 if unset. The Trainer clips to `max_grad_norm` instead."""
        clipping = self.dist_config.gradient_clipping
        return float(clipping) if self.around.own_model is None and isinstance(clipping, (int, float)) else 0.0

    def clip_grad_value_(self, parameters: object, clip_value: float) -> None:
        """Clamp every element of the gradients of `parameters`."""
        listed = listed_gradients(self.engines, parameters)
        for window, ids in listed.windows:
            window.clamp(float(clip_value), ids)
        for grad in listed.plain:
            grad.clamp_(-float(clip_value), float(clip_value))

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite."""
        return any(engine.schedule_waits for engine in self.engines)
