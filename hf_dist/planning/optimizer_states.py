"""Bytes that an optimizer keeps for a trainable tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dist.config import DistConfig
from hf_dist.optim.attach import FragmentedOptimizer
from hf_dist.optim.build import build_optimizer, is_from_config
from hf_dist.optim.compound import leaves
from hf_dist.optim.muon import is_matrix
from hf_dist.optim.optimizers import Optimizers
from hf_dist.optim.stepping import like
from hf_dist.sharding.layout import ParamSlot
from hf_dist.sharding.precision import states_in_bf16

__all__ = ["OptimizerStates"]

_PROBE_NUMEL = 8192
"""Elements of a probe tensor: below 4096 elements, 8-bit optimizers keep 32-bit states."""


@dataclass(frozen=True)
class OptimizerStates:
    """State sizes of an optimizer for a trainable tensor."""

    elements: tuple[int, ...] = (4, 4)
    """Bytes per element of each state with the tensor's shape; Adam has two."""
    nbytes: int = 4
    """Bytes of all other states per tensor, such as the step."""
    of_matrix: tuple[int, ...] | None = None
    """Like `elements`, for the matrices of Muon, which have no step counter; None for another optimizer."""
    of_whole: Callable[[str, tuple[int, ...]], int] | None = None
    """Bytes that the owner of a tensor of this name and shape keeps, for an optimizer that sees whole tensors."""
    names: frozenset[str] | None = None
    """The parameters that the optimizer was given; None for all trainable ones."""
    each: tuple[OptimizerStates, ...] = ()
    """Those of several optimizers, each with the `names` that it steps; empty for one."""
    known: bool = True
    """False if the optimizer could not be probed; its states are then not counted."""

    def of_slot(self, slot: ParamSlot) -> tuple[tuple[int, ...], int]:
        """(`elements`, `nbytes`) of one parameter."""
        for one in self.each:
            if one.names is None or slot.name in one.names:
                return one.of_slot(slot)
        if self.each or self.of_whole is not None or (self.names is not None and slot.name not in self.names):
            return (), 0
        if self.of_matrix is not None and is_matrix(slot.name, len(slot.shape)):
            return self.of_matrix, 0
        return self.elements, self.nbytes

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> OptimizerStates:
        """Read from the optimizer's states. Without any, step a similar optimizer once on a small tensor."""
        if type(optimizer) is torch.optim.Muon:
            return cls((4,), 0)
        for param, state in optimizer.state.items():
            found = cls._read(param, state)
            if found.elements:
                return found
        # Not a copy, which would share states and a schedule's wrapped `step` with the original.
        param = nn.Parameter(torch.zeros(_PROBE_NUMEL))
        try:
            return cls._stepped(like(optimizer, [param], optimizer.defaults), param)
        except Exception:  # a class that needs more than its options
            probe = type(optimizer).__new__(type(optimizer))
        try:
            torch.optim.Optimizer.__init__(probe, [param], dict(optimizer.defaults))
            return cls._stepped(probe, param)
        except Exception:  # a user's class that needs more than its options: a plan is not worth an error
            return cls()

    @classmethod
    def of_attached(cls, fragments: Optimizers | None, config: DistConfig) -> OptimizerStates:
        """For an engine's optimizers: the config's, or the objects passed to it; AdamW if there is none yet."""
        if fragments is None:
            return cls.of_config(config)
        each = tuple(cls._of_member(member, config) for member in fragments.members)
        if len(each) == 1:
            return each[0]
        largest = max((one.elements for one in each), key=sum)
        return cls(largest, 0, each=each, known=all(one.known for one in each))

    @classmethod
    def _of_member(cls, member: FragmentedOptimizer, config: DistConfig) -> OptimizerStates:
        if is_from_config(member.optimizer):
            return cls.of_config(config)
        names = frozenset(name for names in member.param_names for name in names)
        if not member.sees_whole:
            return replace(cls.of(member.optimizer), names=names)
        groups = zip(member.param_names, member.optimizer.param_groups, strict=True)
        options = {name: {k: v for k, v in group.items() if k != "params"} for names, group in groups for name in names}
        found = WholeStates(member.optimizer, options)
        try:
            for group in member.sharded.trainable_groups:
                for slot in group.layout.slots:
                    found(slot.name, slot.shape)
        except Exception:  # a user's class, on tensors without elements: a plan is not worth an error
            return cls((), 0, of_whole=lambda _, __: 0, names=names, known=False)
        return cls((), 0, of_whole=found, names=names)

    @classmethod
    def of_config(cls, config: DistConfig) -> OptimizerStates:
        """For the config's optimizer, or the Trainer's AdamW if the config has none."""
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
            return cls((4, 4), 0, of_whole=lambda _, shape: 8 * math.prod(shape))
        if name == "Adafactor":
            first = 4 if params.get("beta1") is not None else 0
            return cls((first,), 0, of_whole=lambda _, shape: _factored_nbytes(shape) + first * math.prod(shape))
        param = nn.Parameter(torch.zeros(_PROBE_NUMEL))
        return cls._stepped(build_optimizer(name, params, [param]), param)

    @classmethod
    def _stepped(cls, optimizer: torch.optim.Optimizer, param: nn.Parameter) -> OptimizerStates:
        param.grad = torch.zeros_like(param)
        optimizer.step()
        return cls._read(param, optimizer.state.get(param, {}))

    @classmethod
    def _read(cls, param: torch.Tensor, state: Mapping[str, object]) -> OptimizerStates:
        found = [v for v in state.values() if isinstance(v, torch.Tensor)]
        shaped = tuple(v.element_size() for v in found if v.shape == param.shape)
        return cls(shaped, sum(v.numel() * v.element_size() for v in found if v.shape != param.shape))


class _NumbersAreOne(TorchDispatchMode):
    """Returns 1 when a step reads a value of a tensor without elements, as torch's Adafactor does for a norm."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))


class WholeStates:
    """Bytes that an optimizer keeps for a whole tensor, found by stepping a similar one on a tensor without elements."""

    def __init__(self, optimizer: torch.optim.Optimizer, options: Mapping[str, Mapping[str, object]]) -> None:
        """`options`: the options of each parameter's param group, by parameter name."""
        self._optimizer = optimizer
        self._options = options
        self._found: dict[tuple[object, ...], int] = {}

    def __call__(self, name: str, shape: tuple[int, ...]) -> int:
        """Bytes for one parameter; 0 if the optimizer was not given it, or if it has no elements."""
        options = self._options.get(name)
        if options is None or not math.prod(shape):
            return 0
        key = (shape, repr(sorted(options.items())))
        if key not in self._found:
            self._found[key] = self._stepped(shape, options)
        return self._found[key]

    def _stepped(self, shape: tuple[int, ...], options: Mapping[str, object]) -> int:
        # Not compiled (torchao compiles its step): the compiler would remember the failure.
        stance = torch.compiler.set_stance("force_eager")
        with stance, FakeTensorMode(), _NumbersAreOne(), torch.random.fork_rng(devices=[]):
            param = nn.Parameter(torch.zeros(shape))
            optimizer = like(self._optimizer, [param], options)
            param.grad = torch.zeros(shape)
            optimizer.step()
            kept = [v for _, v in leaves(optimizer.state[param]) if isinstance(v, torch.Tensor)]
            return sum(v.numel() * v.element_size() for v in kept)


def _factored_nbytes(shape: tuple[int, ...]) -> int:
    """Bytes of Adafactor's row and column means, or of a vector's squares."""
    if len(shape) < 2:
        return 4 * math.prod(shape)
    return 4 * (math.prod(shape[:-1]) + math.prod(shape[:-2] + shape[-1:]))
