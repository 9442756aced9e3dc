"""Progressive layer drop: skips blocks for whole optimizer steps, the same blocks on every rank.

Block l of L runs in a step with probability 1 - l / L * (1 - theta(t)), where
theta(t) = (1 - theta) * exp(-gamma * t) + theta. A skipped block returns its input. There is one draw per step and block:
recomputation, every microbatch and every rank skip the same blocks.

Source: Zhang and He 2020, arXiv 2010.13369; DeepSpeed runtime/progressive_layer_drop.py for theta(t).
"""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_dist.config.training_sections import LayerDropConfig
from hf_dist.errors import ModelError
from hf_dist.parallel.pipeline.blocks import find_blocks

__all__ = ["LayerDropCallback", "left_out"]


def left_out(section: LayerDropConfig, step: int, num_blocks: int, seed: int) -> frozenset[int]:
    """Positions of the blocks that are skipped after `step` optimizer steps."""
    theta = (1.0 - section.theta) * math.exp(-section.gamma * step) + section.theta
    draws = (random.Random(f"{seed} {step} {block}").random() for block in range(num_blocks))
    return frozenset(i for i, draw in enumerate(draws) if draw >= 1.0 - (i + 1) / num_blocks * (1.0 - theta))


class LayerDropCallback(TrainerCallback):
    """Draws at the start of each step. The blocks read the result when they are called in training."""

    def __init__(self, trainer: Any, section: LayerDropConfig) -> None:
        self._trainer = weakref.ref(trainer)  # the trainer holds its callbacks
        self._section = section
        self._blocks: list[_Block] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Replace the blocks' forwards. Raises `ModelError` for a model without repeated blocks."""
        trainer = self._trainer()
        if trainer is not None:
            self._blocks = [_Block(module) for module in find_blocks(trainer.model).values()]
            if not self._blocks:
                raise ModelError("progressive_layer_drop: the model has no repeated blocks that could be left out")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Draw the blocks to skip."""
        out = left_out(self._section, state.global_step, len(self._blocks), args.seed)
        for position, block in enumerate(self._blocks):
            block.is_out = position in out

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Restore the forwards."""
        for block in self._blocks:
            block.restore()
        self._blocks = []


class _Block:
    """One block whose forward may return its input."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.is_out = False
        self._forward: Callable[..., object] = module.forward
        self._own = "forward" in vars(module)
        self._num_outputs: int | None = None  # None until known; 0: a tensor, not a tuple
        module.forward = self._call

    def restore(self) -> None:
        """Restore the module's forward."""
        if self._own:
            self.module.forward = self._forward
        else:
            del self.module.forward

    def _call(self, *args: object, **kwargs: object) -> object:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not (self.is_out and self.module.training) or self._num_outputs is None or hidden is None:
            output = self._forward(*args, **kwargs)
            self._num_outputs = len(output) if isinstance(output, tuple) else 0
            if not (self.is_out and self.module.training) or hidden is None:
                return output
        return (hidden, *[None] * (self._num_outputs - 1)) if self._num_outputs else hidden
