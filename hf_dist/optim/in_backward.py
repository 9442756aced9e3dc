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

from hf_dist.config import DistConfig, settled
from hf_dist.errors import ConfigError, ModelError, Problem
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


def steps_in_backward(config: DistConfig) -> bool:
    """Whether the resolved `config` asks for it. Raises `ConfigError` when another key needs all gradients first."""
    if not config.hf_dist.optimizer_in_backward:
        return False
    clipping = settled(config.gradient_clipping)
    if clipping:
        raise ConfigError(
            Problem(
                "gradient_clipping",
                f"{clipping:g}",
                f"needs the norm of all gradients before the first is stepped, which {KEY} rules out",
                'Set "gradient_clipping": 0 (max_grad_norm=0 in the Trainer), or remove the other key.',
            )
        )
    if settled(config.fp16.enabled):
        reason = f"skips steps by a look at all gradients, which {KEY} rules out"
        raise ConfigError(Problem("fp16.enabled", "true", reason, "Train in bf16, or remove the other key."))
    path = "bf16.check_grad_overflow"
    if config.bf16.check_grad_overflow and config.source_of(path) == "file":
        reason = f"skips steps by a look at all gradients, which {KEY} rules out"
        raise ConfigError(Problem(path, "true", reason, "Set it to false, or remove the other key."))
    return True
