"""Bytes that an optimizer keeps for a trained tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_dist.config import DistConfig
from hf_dist.optim.build import build_optimizer
from hf_dist.optim.muon import is_matrix
from hf_dist.sharding.layout import ParamSlot
from hf_dist.sharding.precision import states_in_bf16

__all__ = ["OptimizerStates"]

_PROBE_NUMEL = 8192
"""Of a tensor that is stepped to see: below 4096 elements 8-bit states keep 32."""


@dataclass(frozen=True)
class OptimizerStates:
    """What an optimizer keeps for a trained tensor."""

    elements: tuple[int, ...] = (4, 4)
    """Bytes per element of each of its states that have the tensor's shape; Adam has two."""
    nbytes: int = 4
    """Of everything else that it keeps per tensor, such as its step."""
    of_matrix: tuple[int, ...] | None = None
    """Like `elements`, of what Muon takes for matrices, which have no step; None for another optimizer."""
    of_whole: Callable[[tuple[int, ...]], int] | None = None
    """Bytes of a tensor of this shape at its owner, for an optimizer that sees whole tensors."""

    def of_slot(self, slot: ParamSlot) -> tuple[tuple[int, ...], int]:
        """(`elements`, `nbytes`) of one parameter."""
        if self.of_matrix is not None and is_matrix(slot.name, len(slot.shape)):
            return self.of_matrix, 0
        return self.elements, self.nbytes

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> OptimizerStates:
        """Read from the states that it has, else found by one step of an optimizer like it on a small tensor."""
        if type(optimizer) is torch.optim.Muon:
            return cls((4,), 0)
        for param, state in optimizer.state.items():
            found = cls._read(param, state)
            if found.elements:
                return found
        # Not a copy: that would share states, and a schedule's wrapped `step`, with the original.
        probe = type(optimizer).__new__(type(optimizer))
        param = nn.Parameter(torch.zeros(_PROBE_NUMEL))
        try:
            torch.optim.Optimizer.__init__(probe, [param], dict(optimizer.defaults))
            return cls._stepped(probe, param)
        except Exception:  # somebody's class, which wants more than its options: a plan is not worth an error
            return cls()

    @classmethod
    def of_config(cls, config: DistConfig) -> OptimizerStates:
        """Of the config's optimizer; of the Trainer's AdamW if it has none."""
        found = cls._wide(config)
        if states_in_bf16(config):
            return replace(found, elements=tuple(2 for _ in found.elements))
        return found

    @classmethod
    def _wide(cls, config: DistConfig) -> OptimizerStates:
        if config.optimizer is None:
            return cls()
        name, params = config.optimizer.type, config.optimizer.params
        if name == "Muon":
            return cls(of_matrix=(4,))
        if name == "Lamb":
            return cls((4, 4), 0, of_whole=lambda shape: 8 * math.prod(shape))
        if name == "Adafactor":
            first = 4 if params.get("beta1") is not None else 0
            return cls((first,), 0, of_whole=lambda shape: _factored_nbytes(shape) + first * math.prod(shape))
        param = nn.Parameter(torch.zeros(_PROBE_NUMEL))
        return cls._stepped(build_optimizer(name, params, [param]), param)

    @classmethod
    def _stepped(cls, optimizer: torch.optim.Optimizer, param: nn.Parameter) -> OptimizerStates:
        param.grad = torch.zeros_like(param)
        optimizer.step()
        return cls._read(param, optimizer.state.get(param, {}))

    @classmethod
    def _read(cls, param: torch.Tensor, state: Mapping[str, Any]) -> OptimizerStates:
        found = [v for v in state.values() if isinstance(v, torch.Tensor)]
        shaped = tuple(v.element_size() for v in found if v.shape == param.shape)
        return cls(shaped, sum(v.numel() * v.element_size() for v in found if v.shape != param.shape))


def _factored_nbytes(shape: tuple[int, ...]) -> int:
    """Of Adafactor's means of rows and columns, or of a vector's squares."""
    if len(shape) < 2:
        return 4 * math.prod(shape)
    return 4 * (math.prod(shape[:-1]) + math.prod(shape[:-2] + shape[-1:]))
