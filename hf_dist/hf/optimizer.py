"""The optimizer as accelerate, HF schedulers and the Trainer see it."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from hf_dist.engine import Engine


class DistOptimizer(AcceleratedOptimizer):
    """Steps the engine instead of the bare optimizer; `param_groups` and `state` are the inner optimizer's."""

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Engine, max_norm: float = 0.0) -> None:
        """`max_norm`: clip to it, also where the loop has not asked (`gradient_clipping` of the JSON); 0: do not."""
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.engine = engine
        self._max_norm = max_norm
        self._is_accelerate_prepared = True

    def step(self, closure: Any = None) -> None:
        """At the end of a window: clip, step, gather replicated weights. Every rank calls it."""
        if self.gradient_state.sync_gradients:
            if closure is not None:  # its backward adds to what is clipped
                with torch.enable_grad():
                    closure()
            if self._max_norm:
                self.engine.clip_grad_norm(self._max_norm)
            self.engine.apply_gradients()
            self._is_overflow = self.engine.step_was_skipped

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the window's gradients."""
        if self.gradient_state.sync_gradients:
            self.engine.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """This rank's fragments, by parameter name."""
        assert self.engine.fragments is not None
        return self.engine.fragments.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict()` of the same rank and layout."""
        assert self.engine.fragments is not None
        self.engine.fragments.load_state_dict(state_dict)
