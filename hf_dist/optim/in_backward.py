"""The optimizer's step inside of backward (`hf_dist.optimizer_in_backward`): no gradient outlives its unit.

A group is stepped when its gradient is final, after the reduction of the window's last microbatch, and the gradient's memory
goes at once: of the reduced gradients one or two units are there instead of all. That is possible where nothing has to be
known of all gradients first, so neither clipping nor skipped steps go with it. For an element-wise optimizer the result is
the same to the last bit. (LOMO, Lv et al. 2023, arXiv 2306.09782, fuses the two likewise.)

A group of which this rank had no gradient for some parameter is stepped at the end, as without: only then the ranks know
whether another one had it.
"""

from __future__ import annotations

import torch

from hf_dist.errors import ModelError
from hf_dist.offload.resting import Tier
from hf_dist.optim.attach import FragmentedOptimizer
from hf_dist.optim.clip import owned_norm
from hf_dist.sharding.group import FlatGroup

KEY = "hf_dist.optimizer_in_backward"


class StepInBackward:
    """Steps groups one by one, and keeps what the end of the window asks for."""

    def __init__(self, fragments: FragmentedOptimizer) -> None:
        """`fragments` must have one batch for every group."""
        self.norms: dict[int, torch.Tensor] = {}
        """id of a stepped group -> L2 norm of the part that this rank answers for, 0D."""
        self._fragments = fragments
        self._landing: FlatGroup | None = None

    def gradient_final(self, group: FlatGroup) -> None:
        """The reduction of `group` is complete. Local; called in the order of the reductions.

        A gradient on its way to the host is stepped when the next one is complete: it lands while that unit computes.
        Raises `ModelError` when the group was stepped before in this window.
        """
        if id(group) in self.norms:
            raise ModelError(
                f"{group.layout.slots[0].name} and its unit got another gradient after they were stepped: with {KEY} the last "
                "microbatch of a window may have one backward only, and activation checkpointing must not be reentrant "
                "(use_reentrant=False). Add up the losses before backward, or remove the key."
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
        """Forget which groups were stepped."""
        self.norms.clear()
        self._landing = None
        self._fragments.end_window()
