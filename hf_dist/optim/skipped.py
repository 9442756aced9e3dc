"""Which optimizer steps were skipped, as gradients were not finite; on a GPU known one step late.

There the step itself leaves everything as it is (`step_scaling.py`). Asking at once would make the host wait for the whole
backward, with nothing for the GPU to do after it. A step later the answer has long arrived.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_dist.offload.host import brought

__all__ = ["SkippedSteps"]


class SkippedSteps:
    """Counts them. Every rank makes the same calls and comes to the same answers."""

    def __init__(self) -> None:
        self.last = False
        """Whether the last step was skipped; where answers are late, the one before it."""
        self._known = 0
        self._under_way: Any = None  # reads the last flag, when it has arrived

    @property
    def count(self) -> int:
        """All so far. The host waits for the last answer if it is still on its way."""
        return self._known + int(self._late())

    @count.setter
    def count(self, value: int) -> None:
        self._known, self._under_way = value, None

    def tell(self, skipped: bool) -> None:
        """The step that comes now is skipped, or not."""
        self._known = self.count + int(skipped)
        self.last, self._under_way = skipped, None

    def tell_late(self, flag: torch.Tensor) -> None:
        """The same as a tensor on the GPU, 0D: not 0 if it is skipped. The host waits for the answer of the step before."""
        late = self._late()
        self._known += int(late)
        self.last, self._under_way = late, brought(flag)

    def _late(self) -> bool:
        return self._under_way is not None and bool(self._under_way())

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; plain numbers."""
        return {"skipped_steps": self.count, "skip_not_told": self._late()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` gave; checkpoints of older versions lack the second number."""
        late = bool(state.get("skip_not_told", False))
        self._known, self.last = int(state["skipped_steps"]) - late, False
        self._under_way = (lambda: True) if late else None
