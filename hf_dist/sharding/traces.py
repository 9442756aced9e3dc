"""What preparing a model has left on its modules and parameters, so that it can be taken off again.

Hooks and stand-ins of ours are known by the module that defines them. What ours has set on modules that had it before (a class,
a flag of HF's, a compiled call) is found by comparison: the model before and after it was prepared.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["Traces", "remove_hooks"]

_ABSENT = object()
_PARTS = {"_parameters", "_buffers", "_modules", "training"}


@dataclass
class Traces:
    """Of one model, by the names of its modules and parameters: it holds neither."""

    _attributes: dict[tuple[str, str], tuple[Any, Any]] = field(default_factory=dict)
    _classes: dict[str, tuple[type, type]] = field(default_factory=dict)
    _frozen: dict[str, tuple[bool, bool]] = field(default_factory=dict)

    @classmethod
    def between(cls, before: Mapping[str, Any], model: nn.Module) -> Traces:
        """`before`: what `look` returned. Local."""
        after, traces = look(model), cls()
        for name in before["classes"].keys() & after["classes"].keys():
            if (pair := (before["classes"][name], after["classes"][name]))[0] is not pair[1]:
                traces._classes[name] = pair
            old, new = before["attributes"][name], after["attributes"][name]
            for key in old.keys() | new.keys():
                one, other = old.get(key, _ABSENT), new.get(key, _ABSENT)
                new_and_ours = one is _ABSENT and (_is_ours(other) or _is_ours(type(other)))
                if one is not other and not new_and_ours:  # those are known without it; the keeper of this is one
                    traces._attributes[name, key] = one, other
        for name in before["trains"].keys() & after["trains"].keys():
            if before["trains"][name] != after["trains"][name]:
                traces._frozen[name] = before["trains"][name], after["trains"][name]
        return traces

    def undo(self, model: nn.Module) -> None:
        """Put back what nobody has changed since. Local."""
        modules = dict(model.named_modules())
        for name, (cls, ours) in self._classes.items():
            if name in modules and type(modules[name]) is ours:
                modules[name].__class__ = cls
        for (name, key), (value, ours) in self._attributes.items():
            own = modules[name].__dict__ if name in modules else {}
            if own.get(key, _ABSENT) is ours and value is not ours:
                if value is _ABSENT:
                    del own[key]
                else:
                    own[key] = value
        for name, param in model.named_parameters():
            trained, ours_trains = self._frozen.get(name, (None, None))
            if trained is not None and param.requires_grad == ours_trains:
                param.requires_grad_(trained)
        for module in modules.values():
            remove_hooks(module)
            if _is_ours(type(module.__dict__.get("generate"))):
                module.__dict__.pop("_is_fsdp_managed_module", None)  # set with it, after the comparison
            for key in [key for key, value in module.__dict__.items() if _is_ours(value) or _is_ours(type(value))]:
                del module.__dict__[key]


def look(model: nn.Module) -> dict[str, dict[str, Any]]:
    """What `Traces.between` compares. Local, without a look at an element."""
    modules = dict(model.named_modules())
    return {
        "classes": {name: type(module) for name, module in modules.items()},
        "attributes": {name: _own(module) for name, module in modules.items()},
        "trains": {name: param.requires_grad for name, param in model.named_parameters()},
    }


def _own(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in module.__dict__.items() if key not in _PARTS and "_hooks" not in key}


def remove_hooks(owner: nn.Module | torch.Tensor) -> None:
    """Take the hooks of ours off a module or a parameter. Local."""
    names = owner.__dict__ if isinstance(owner, nn.Module) else ("_backward_hooks", "_post_accumulate_grad_hooks")
    found = [(name, getattr(owner, name, None)) for name in names if "_hooks" in name]
    kept: list[dict[int, Any]] = [hooks for _, hooks in found if isinstance(hooks, dict)]
    ours = {number for hooks in kept for number, hook in hooks.items() if _is_ours(hook)}
    for hooks in kept:
        for number in ours & hooks.keys():
            del hooks[number]


def _is_ours(value: Any) -> bool:
    while isinstance(value, functools.partial):
        value = value.func
    # torch wraps hooks that load state dicts.
    value = getattr(value, "hook", value)
    return str(getattr(value, "__module__", "")).startswith("hf_dist.")
