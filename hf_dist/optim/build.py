"""Builds the optimizer of the `optimizer` section by DeepSpeed's naming rules, on torch's own classes.

`config/params.py` defines the valid names, parameters and values; this module makes objects from them.
Sources: DeepSpeed runtime/engine.py (`_configure_basic_optimizer`), ops/adam, ops/adagrad, ops/lion.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import nn

from hf_dist.config.arguments import ONE_BIT_OPTIMIZERS
from hf_dist.config.params import read_optimizer
from hf_dist.errors import ConfigError, Problem
from hf_dist.optim.adafactor import Adafactor
from hf_dist.optim.bias_correction import leave_out_bias_correction
from hf_dist.optim.lamb import Lamb
from hf_dist.optim.lion import Lion
from hf_dist.optim.muon import Muon, muon_groups
from hf_dist.optim.onebit_adam import OneBitAdam, ZeroOneAdam
from hf_dist.optim.onebit_lamb import OneBitLamb, Ratios

__all__ = ["build_optimizer", "is_from_config", "optimizer_for"]

T = TypeVar("T")

_FROM_CONFIG = "_hf_dist_from_config"

_ADAM_SWITCHES = {"torch_adam": False, "adam_w_mode": True, "bias_correction": True}
"""DeepSpeed's switches of Adam and their defaults."""

# "meta": the parameters are not placed yet; both devices they can move to have the kernels.
_FUSED_DEVICES = {"cpu", "cuda", "meta"}


_OWN: Mapping[str, type[torch.optim.Optimizer]] = {
    **{"Lion": Lion, "Lamb": Lamb, "Adafactor": Adafactor, "Muon": Muon},
    **{"OneBitAdam": OneBitAdam, "ZeroOneAdam": ZeroOneAdam, "OneBitLamb": OneBitLamb},
}
"""Names for which torch has no class, or a different one."""


def optimizer_for(model: nn.Module, type: str, params: Mapping[str, object]) -> torch.optim.Optimizer:
    """`build_optimizer` over the trainable parameters of `model`. Muon groups them by name and shape. Local."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if read_optimizer(type, params)[0] == "Muon":
        return build_optimizer(type, params, muon_groups(named, read_optimizer(type, params)[1]))
    # Pass a group even if a pipeline stage has nothing to train: torch refuses an empty list but not an empty group.
    return build_optimizer(type, params, [{"params": [p for _, p in named]}])


def build_optimizer(
    type: str,
    params: Mapping[str, object],
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
) -> torch.optim.Optimizer:
    """The torch optimizer that `optimizer.type` and `optimizer.params` stand for in DeepSpeed.

    "Adam" and "AdamW" both use decoupled weight decay, except "Adam" with `adam_w_mode: false`. Their `weight_decay` is 0
    unless given (with `torch_adam`: torch's default). Classes with a fused kernel use it unless `foreach` or `fused` is
    given. `params` must not contain "auto".

    Whether the optimizer must see whole tensors is decided by `sight_of`, not here.

    Raises:
        ConfigError: an unknown or unavailable type, or params that it does not take; lists all of them.
    """
    name, arguments = read_optimizer(type, params)
    arguments.pop("fp32_optimizer_states", None)  # concerns states at rest, not the class
    switches = dict(_ADAM_SWITCHES)
    if name not in ("Lamb", *ONE_BIT_OPTIMIZERS):  # these correct their bias themselves
        switches = {key: arguments.pop(key, default) for key, default in _ADAM_SWITCHES.items()}
    cls = _optimizer_class(name, adam_w_mode=switches["adam_w_mode"])
    if name in ("Adam", "AdamW") and not switches["torch_adam"]:
        arguments.setdefault("weight_decay", 0.0)  # torch.optim.AdamW alone would decay by 0.01
    groups = _as_groups(parameters)
    if name == "Muon":  # its param groups already have the options of Muon and Adam
        arguments = {}
    if name == "OneBitLamb":
        given = {field.name: arguments.pop(field.name) for field in fields(Ratios) if field.name in arguments}
        arguments["ratios"] = Ratios(**given)
    if name not in _OWN and _wants_fused(cls, arguments, groups):
        arguments["fused"] = True
    optimizer = construct("optimizer", cls, groups, arguments)
    if name in ("Adam", "AdamW") and not switches["bias_correction"]:
        leave_out_bias_correction(optimizer)
    setattr(optimizer, _FROM_CONFIG, True)
    return optimizer


def is_from_config(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `build_optimizer` made it, rather than user code. Local."""
    return hasattr(optimizer, _FROM_CONFIG)


def _optimizer_class(name: str, *, adam_w_mode: bool) -> type[torch.optim.Optimizer]:
    if name in _OWN:
        return _OWN[name]
    if name == "Adam" and adam_w_mode:  # "AdamW" stays decoupled whatever adam_w_mode says
        return torch.optim.AdamW
    cls: type[torch.optim.Optimizer] = getattr(torch.optim, name)
    return cls


def _as_groups(parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> list[dict[str, object]]:
    """Param groups with lists of parameters, because they are read twice: for their device, and by the class."""
    groups: list[dict[str, object]] = []
    plain: list[nn.Parameter] = []
    for item in parameters:
        if isinstance(item, dict):
            params = item["params"]
            groups.append({**item, "params": [params] if isinstance(params, torch.Tensor) else list(params)})
        else:
            plain.append(item)
    return [{"params": plain}, *groups] if plain else groups


def _wants_fused(cls: type, arguments: Mapping[str, object], groups: Sequence[dict[str, Any]]) -> bool:
    """Whether to use the fused kernel: the class has one, the user has not chosen, and the device supports it."""
    if "fused" not in inspect.signature(cls).parameters or arguments.get("differentiable"):
        return False
    if arguments.get("fused") is not None or arguments.get("foreach") is not None:
        return False
    return {p.device.type for group in groups for p in group["params"]} <= _FUSED_DEVICES


def construct(section: str, cls: Callable[..., T], first: object, arguments: Mapping[str, object]) -> T:
    """`cls(first, **arguments)`, lists as tuples where it has tuples; what it refuses is a `ConfigError` naming the section."""
    defaults = inspect.signature(cls).parameters
    given = {
        key: tuple(map(float, value)) if isinstance(value, list) and isinstance(defaults[key].default, tuple) else value
        for key, value in arguments.items()
    }
    try:
        return cls(first, **given)
    except ConfigError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        name = getattr(cls, "__name__", repr(cls))
        problem = Problem(f"{section}.params", repr(dict(arguments)), f"is refused by {name}: {error}", "")
        raise ConfigError(problem) from error
