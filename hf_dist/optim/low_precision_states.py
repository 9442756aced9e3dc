"""Optimizer states and master weights that rest in bf16 and are stepped in fp32, for any element-wise optimizer.

    swap_in    bf16 -> fp32, for one batch of fragments
    step       in fp32, as usual
    swap_out   fp32 -> bf16, rounded to the nearest, or stochastically, so that the mean is right

With beta2 = 0.999, a second moment changes by 0.1% of its value per step, but bf16 values are 0.8% apart: rounded to the
nearest, it never changes. The same holds for weights, because updates are far smaller than bf16's spacing of 0.4 to 0.8%.
DeepSpeed's keys ask for this rounding; `hf_dist.stochastic_rounding` lets both change.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_dist.config import DistConfig, settled
from hf_dist.errors import ConfigError, Problem
from hf_dist.optim.fragment import Fragment
from hf_dist.optim.stand_in import point_at
from hf_dist.optim.step_batch import StepBatch
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.precision import states_in_bf16
from hf_dist.sharding.prepared import raw_data

__all__ = ["RoundedBatch", "Rounding", "rounding_of"]


class Rounding:
    """Rounds fp32 to bf16."""

    def __init__(self, *, stochastic: bool, seed: int = 0, states: bool = True) -> None:
        """`seed`: of this rank's random numbers, which checkpoints do not save; `states`: whether to round states too."""
        self.stochastic = stochastic
        self.states = states
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """`values` (1-D fp32) rounded to bf16. Values that bf16 can represent do not change."""
        if not self.stochastic:
            return values.bfloat16()
        generator = self._generators.get(values.device)
        if generator is None:
            generator = self._generators[values.device] = torch.Generator(values.device)
            generator.manual_seed(self._seed)
        bits = values.contiguous().view(torch.int32)
        noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
        chosen = torch.where(values.isfinite(), (bits + noise) & -(1 << 16), bits)
        return chosen.view(torch.float32).bfloat16()


class RoundedBatch(StepBatch):
    """Fragments of one group whose states, masters or both rest in bf16."""

    def __init__(self, group: FlatGroup, fragments: Sequence[Fragment], rounding: Rounding) -> None:
        super().__init__([group], fragments)
        self.on_device = self.in_place = False
        self._rounding = rounding

    def swap_in(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace states and masters by fp32 copies."""
        for f in self.fragments:
            if f.tensor.dtype is torch.bfloat16:
                point_at(f.tensor, raw_data(f.tensor).float())
        for state in (optimizer.state.get(f.tensor, {}) for f in self.fragments):
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16:
                    state[key] = value.float()

    def swap_out(self, optimizer: torch.optim.Optimizer) -> None:
        """Round states and masters back to bf16."""
        for f in self.fragments:
            state = optimizer.state.get(f.tensor, {})
            for key, value in state.items():
                if self._rounding.states and f.is_like(value) and value.dtype is torch.float32:
                    state[key] = self._rounding(value)
            rests = f.group.source[f.start : f.stop]
            if rests.dtype is torch.bfloat16 and f.tensor.dtype is torch.float32:
                rests.copy_(self._rounding(raw_data(f.tensor)))
                point_at(f.tensor, rests)
        super().swap_out(optimizer)


def rounding_of(config: DistConfig, rank: int) -> Rounding | None:
    """The rounding that the resolved `config` asks for; None for fp32 states. Raises `ConfigError` without bf16. Local."""
    narrow = {key: getattr(config.bf16, key) for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states")}
    paths = {f"bf16.{key}": "true" for key, wanted in narrow.items() if wanted}
    if config.optimizer is not None and config.optimizer.params.get("fp32_optimizer_states") is False:
        paths["optimizer.params.fp32_optimizer_states"] = "false"
    stochastic = config.hf_dist.stochastic_rounding
    if not paths:
        if stochastic:
            fix = 'Add "bf16_optimizer_states": true to "bf16", or remove the key.'
            raise ConfigError(
                Problem("hf_dist.stochastic_rounding", "true", "rounds states and weights in bf16 only", fix)
            )
        return None
    path, found = next(iter(paths.items()))
    if not settled(config.bf16.enabled):
        fix = "Train in bf16, or remove the key."
        raise ConfigError(Problem(path, found, "needs bf16: both follow the dtype of the weights", fix))
    if config.zero_optimization.offload_optimizer.device == "nvme":
        fix = 'Remove the key, or set "device" to "cpu".'
        raise ConfigError(Problem(path, found, "is not available with states on disk", fix))
    seed = torch.initial_seed() % (1 << 31) + rank
    return Rounding(stochastic=stochastic, seed=seed, states=states_in_bf16(config))
