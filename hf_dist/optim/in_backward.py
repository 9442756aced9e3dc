"""The optimizer step inside the backward (`hf_dist.optimizer_in_backward`): no gradient outlives its unit.

A group is stepped once its gradient is final, after the reduction of the window's last microbatch, and the gradient is freed
at once. So reduced gradients of only one or two units exist at a time. The step must not depend on all gradients, which rules
out clipping and skipped steps. For an element-wise optimizer, results are bitwise the same. (LOMO, Lv et al. 2023, arXiv
2306.09782, fuses backward and step in the same way.)

If a parameter of a group has no gradient on this rank, the group is stepped at the window's end as usual: only then do the
ranks know whether another rank had one.
"""

from __future__ import annotations

import torch

from hf_dist.errors import ModelError
from hf_dist.memory.offload.resting import Tier
from hf_dist.optim.attach import FragmentedOptimizer
from hf_dist.optim.clip import owned_norm
from hf_dist.sharding.group import FlatGroup

KEY = "hf_dist.optimizer_in_backward"


class StepInBackward:
    """Steps groups one by one, and keeps their norms for the end of the window."""

    def __init__(self, fragments: FragmentedOptimizer) -> None:
        """`fragments` must have one batch for every group."""
        self.norms: dict[int, torch.Tensor] = {}
        """id of a stepped group -> L2 norm of the part that this rank owns, 0D."""
        self._fragments = fragments
        self._landing: FlatGroup | None = None

    def gradient_final(self, group: FlatGroup) -> None:
        """Called when the reduction of `group` is complete. Local; called in the order of the reductions.

        An offloaded gradient is stepped when the next one is complete, so that its transfer overlaps that unit's backward.
        Raises `ModelError` if the group was already stepped in this window.
        """
        if id(group) in self.norms:
            raise ModelError(
                f"{group.layout.slots[0].name} and its unit got another gradient after they were stepped: with {KEY}, the last "
                "microbatch of a window may have only one backward, and activation checkpointing must not be reentrant "
                "(use_reentrant=False). Sum the losses before backward, or remove the key."
            )
        if not all(group.window.used):
            return
        if group.master.tier is Tier.DEVICE:
            self._step(group)
            return
        before, self._landing = self._landing, group
        if before is group:
            return
        self._fragments.will_step(group)
        if before is not None:
            self._step(before)

    def _step(self, group: FlatGroup) -> None:
        group.gradient.wait()
        self.norms[id(group)] = owned_norm(group)
        self._fragments.step_group(group)
        group.release_gradient()

    def end_window(self) -> None:
        """Forget which groups were stepped. Local."""
        self.norms.clear()
        self._landing = None
        self._fragments.end_window()
