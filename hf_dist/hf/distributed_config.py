"""transformers' `DistributedConfig` in `from_pretrained`: hidden from transformers, and followed when the model is trained.

A layout with a size above 1 is taken out of the call, so transformers loads an ordinary model, streamed from its files. That
model remembers the layout. The Trainer or accelerator that trains it reads the sizes as keys of the JSON (`parallelism.py`).
`tp_plan=` and `tp_size=`, which `DistributedConfig` replaces, are read alike. Without a size above 1 nothing changes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_dist.config.distributed_config import distributed_layout
from hf_dist.config.foreign_layout import ForeignLayout
from hf_dist.dist.launch import detect_launch
from hf_dist.errors import ModelError
from hf_dist.hf.loading import streaming
from hf_dist.hf.stock_hook import StockHook
from hf_dist.log import say_once

__all__ = ["asked_layout", "take_always", "take_while_alive"]

_GIVEN, _ALONE = "distributed_config", ("tp_plan", "tp_size")
_ASKED = "_hf_dist_layout"
_ever = False
"""Whether the whole process runs under hf_dist."""


def take_always() -> None:
    """Take every layout from now on, also before there are arguments with a config. For scripts under `hf_dist.run`."""
    global _ever
    if not _ever:
        _ever = True
        _HOOK.begin()


def take_while_alive(owner: object) -> None:
    """Take every layout until `owner` (arguments or an accelerator that have a config) is garbage-collected."""
    _HOOK.while_alive(owner)


def asked_layout(model: nn.Module | None) -> ForeignLayout | None:
    """The layout that `model`, or a part of it, was loaded with; None without one. From here on the caller follows it."""
    found: ForeignLayout | None = None
    for module in () if model is None else model.modules():
        layout = module.__dict__.get(_ASKED)
        if layout is None:
            continue
        if found is not None and found != layout:
            raise ModelError(
                f"parts of {type(model).__name__} were loaded with different layouts ({_said(found)}; {_said(layout)}). Give "
                "all of them the same distributed_config."
            )
        found = layout
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is _refuse_training:
                del module._forward_pre_hooks[key]
    return found


@functools.wraps(PreTrainedModel.from_pretrained.__func__)  # type: ignore[attr-defined]
def _from_pretrained(model_class: Any, *args: object, **kwargs: Any) -> Any:
    """Stands in for `PreTrainedModel.from_pretrained`."""
    layout = _taken(kwargs) if _HOOK.users else None
    if layout is None:
        return _HOOK.stock(model_class, *args, **kwargs)
    for name, why in layout.unused.items():
        say_once(f"{layout.tool}.{name}: {why}")
    alone = _ever and _HOOK.users == 1  # else the arguments with a config have chosen (hf_dist.lazy_load)
    with streaming() if alone else nullcontext():
        result = _HOOK.stock(model_class, *args, **kwargs)
    model = result[0] if isinstance(result, tuple) else result  # `output_loading_info`
    model.__dict__[_ASKED] = layout
    model.register_forward_pre_hook(_refuse_training)
    return result


def _taken(kwargs: dict[str, Any]) -> ForeignLayout | None:
    """The layout among the arguments, which are then removed; None, and nothing removed, if all its sizes are 1."""
    given = kwargs.get(_GIVEN)
    fields = {} if given is None else {"tp_size": None, **given} if isinstance(given, Mapping) else dict(vars(given))
    alone = {name: kwargs[name] for name in _ALONE if kwargs.get(name) is not None}
    if alone.keys() & fields.keys():
        return None  # transformers refuses both at once
    layout = distributed_layout({**fields, **alone}, detect_launch().world_size)
    if not layout.sizes:
        return None
    for name in (_GIVEN, *_ALONE):
        kwargs.pop(name, None)
    return layout


def _refuse_training(model: nn.Module, _: object) -> None:
    """Hook of a model whose layout nobody has followed: each rank would train alone, on the whole model."""
    if model.training and torch.is_grad_enabled():
        raise ModelError(
            f"{type(model).__name__} was loaded with {_said(model.__dict__[_ASKED])}, and is trained by a loop that hf_dist "
            "does not run. Use a Trainer, or name a JSON (`hf_dist.run --config FILE`), so that accelerate's Accelerator is "
            "hf_dist's, or start the script without hf_dist.run."
        )


def _said(layout: ForeignLayout) -> str:
    return f"{layout.tool}(" + ", ".join(f"{name}={size}" for size, name in layout.sizes.values()) + ")"


_HOOK = StockHook(PreTrainedModel, "from_pretrained", _from_pretrained, classmethod)
