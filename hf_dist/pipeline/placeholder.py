"""What stands where a parameter of another stage was: zeros of its shape that take no memory and are no parameter."""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import partial

import torch
from torch import nn

from hf_dist.pipeline.intercept import fix_property

__all__ = ["Placeholders"]


class Placeholders:
    """All placeholders of one model, on the device of the parameters that stay."""

    def __init__(
        self, model: nn.Module, kept: Set[int], compute_dtype: Callable[[str, torch.dtype], torch.dtype]
    ) -> None:
        """Replace every parameter of `model` whose id is not in `kept`, by zeros in its `compute_dtype(name, dtype)`.

        Modules left without parameters answer `dtype` and `device`, which HF reads off the first parameter.
        """
        self.tensors: list[torch.Tensor] = []
        self.device = _device_of(model)
        self._places: list[tuple[nn.Module, str, torch.dtype, torch.Size]] = []
        emptied = [
            (module, compute_dtype(f"{path}.{params[0][0]}", params[0][1].dtype))
            for path, module in model.named_modules()
            if hasattr(type(module), "dtype")
            and (params := list(module.named_parameters()))
            and not any(id(p) in kept for _, p in params)
        ]
        for path, module in model.named_modules():
            for name, param in list(module._parameters.items()):
                if param is not None and id(param) not in kept:
                    del module._parameters[name]
                    dtype = compute_dtype(f"{path}.{name}", param.dtype)
                    self._places.append((module, name, dtype, param.shape))
        for module, dtype in emptied:
            fix_property(module, "dtype", partial(_same, dtype))
            fix_property(module, "device", lambda: self.device)
        self._place()

    def follow(self, model: nn.Module) -> None:
        """Move to where the model's parameters are now: it may have been split on meta, or been moved."""
        if (device := _device_of(model)) != self.device:
            self.device = device
            self._place()

    def _place(self) -> None:
        self.tensors = []
        for module, name, dtype, shape in self._places:
            self.tensors.append(torch.zeros((), dtype=dtype, device=self.device).expand(shape))
            setattr(module, name, self.tensors[-1])


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _same(dtype: torch.dtype) -> torch.dtype:
    return dtype
