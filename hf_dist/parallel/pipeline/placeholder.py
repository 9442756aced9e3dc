"""Placeholders for parameters of other stages: zeros of the same shape that take no memory and are not parameters."""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial

import torch
from torch import nn

from hf_dist.parallel.pipeline.intercept import fix_property

__all__ = ["Placeholders"]


class Placeholders:
    """All placeholders of one model, on the device of its remaining parameters."""

    def __init__(
        self,
        model: nn.Module,
        kept: Set[int],
        compute_dtype: Callable[[str, torch.dtype], torch.dtype],
        mark: Callable[[torch.Tensor, str], None] = lambda placeholder, name: None,
    ) -> None:
        """Replace every parameter of `model` whose id is not in `kept` by zeros in `compute_dtype(name, dtype)`. Local.

        `mark` is called with each placeholder and the name of its parameter.
        Modules without remaining parameters get fixed properties `dtype` and `device`, which HF reads from the first parameter.
        """
        self.tensors: list[torch.Tensor] = []
        self._anchor = _first_kept(model, kept)
        self.device = self._device_now()
        self._attributes: list[tuple[nn.Module, str, str, torch.dtype, torch.Size]] = []
        self._mark = mark
        names = {id(p): name for name, p in model.named_parameters()}
        emptied = [
            (module, compute_dtype(names[id(params[0])], params[0].dtype))
            for module in model.modules()
            if hasattr(type(module), "dtype")
            and (params := list(module.parameters()))
            and not any(id(p) in kept for p in params)
        ]
        for module in model.modules():
            for attribute, param in list(module._parameters.items()):
                if param is not None and id(param) not in kept:
                    del module._parameters[attribute]
                    dtype = compute_dtype(names[id(param)], param.dtype)
                    self._attributes.append((module, attribute, names[id(param)], dtype, param.shape))
        for module, dtype in emptied:
            fix_property(module, "dtype", partial(_same, dtype))
            fix_property(module, "device", lambda: self.device)
        self._place()

    def follow(self) -> None:
        """Move the placeholders to the current device of the parameters: the model may have been split on meta, or moved."""
        if (device := self._device_now()) != self.device:
            self.device = device
            self._place()

    def _device_now(self) -> torch.device:
        if self._anchor is None:
            return torch.device("cpu")
        owner, attribute = self._anchor
        device: torch.device = getattr(owner, attribute).device
        return device

    def _place(self) -> None:
        self.tensors = []
        for module, attribute, name, dtype, shape in self._attributes:
            self.tensors.append(torch.zeros((), dtype=dtype, device=self.device).expand(shape))
            self._mark(self.tensors[-1], name)
            setattr(module, attribute, self.tensors[-1])


def _first_kept(model: nn.Module, kept: Set[int]) -> tuple[nn.Module, str] | None:
    """(module, attribute) of the first kept parameter; the parameter object itself may be replaced when weights are loaded."""
    for module in model.modules():
        for attribute, param in module._parameters.items():
            if param is not None and id(param) in kept:
                return module, attribute
    return None


def _same(dtype: torch.dtype) -> torch.dtype:
    return dtype
