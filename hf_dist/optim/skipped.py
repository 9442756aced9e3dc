"""Counts optimizer steps that were skipped because gradients were not finite; on a GPU known one step late.

On a GPU, the step kernel itself changes nothing in that case (`step_scaling.py`). Reading the flag at once would make the host
wait for the whole backward and leave the GPU idle after it. One step later, the flag has long arrived.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_dist.memory.offload.host import brought

__all__ = ["SkippedSteps"]


class SkippedSteps:
    """Counts skipped steps. Every rank makes the same calls and gets the same answers."""

    def __init__(self) -> None:
        self.last = False
        """Whether the last step was skipped; if answers are late, the step before it."""
        self._known = 0
        self._under_way: Any = None  # waits for the last flag and returns it

    @property
    def count(self) -> int:
        """Number of skipped steps so far. The host waits for the last flag if it is still in flight."""
        return self._known + int(self._late())

    @count.setter
    def count(self, value: int) -> None:
        self._known, self._under_way = value, None

    def record(self, skipped: bool) -> None:
        """Record whether the current step is skipped."""
        self._known = self.count + int(skipped)
        self.last, self._under_way = skipped, None

    def record_late(self, flag: torch.Tensor) -> None:
        """Like `record`, with a 0D GPU tensor, not 0 if the step is skipped. The host waits for the previous step's flag."""
        late = self._late()
        self._known += int(late)
        self.last, self._under_way = late, brought(flag)

    def _late(self) -> bool:
        return self._under_way is not None and bool(self._under_way())

    def state_dict(self) -> dict[str, object]:
        """Plain numbers for a checkpoint."""
        return {"skipped_steps": self.count, "skip_not_told": self._late()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; checkpoints of older versions lack the second number."""
        late = bool(state.get("skip_not_told", False))
        self._known, self.last = int(state["skipped_steps"]) - late, False
        self._under_way = (lambda: True) if late else None
