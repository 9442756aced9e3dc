"""Weights that other pipeline stages hold: what stands in their place here may only be read where nobody uses the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from hf_dist.errors import FreedParameterError
from hf_dist.sharding.guard import guard, set_owner

__all__ = ["AbsentWeights"]


class AbsentWeights:
    """The owner of one model's placeholders, which are zeros without memory (`parallel/pipeline/placeholder.py`)."""

    is_replicated = False

    def __init__(self, stages: Mapping[str, int], passes_over: Callable[[], bool]) -> None:
        """`stages`: name of a parameter -> the first stage that holds it. `passes_over()`: whether code of an earlier stage is
        running, whose results are replaced by what that stage sends."""
        self._stages = stages
        self._passes_over = passes_over

    def mark(self, placeholder: torch.Tensor, name: str) -> None:
        """Refuse reads and writes of `placeholder` from now on, but for those that code of an earlier stage makes. Local."""
        set_owner(placeholder, lambda: self, name)
        guard(placeholder)

    def make_readable(self, name: str) -> None:
        """Called by the guard. Raises `FreedParameterError` where zeros would be taken for the weights."""
        if not self._passes_over():
            raise FreedParameterError(
                f"parameter {name} is held by pipeline stage {self._stages.get(name, 0)}: this rank has no element of it. "
                "model.named_parameters() has the parameters of this rank's stages. Change weights inside `with "
                "hf_dist.gathered(model, modifier_rank=0):`, on every rank; read those of all stages with "
                "accelerator.get_state_dict(model). If the model itself reads it, for rows unlike those of the example that it "
                "was cut with: lower pipeline.stages."
            )
