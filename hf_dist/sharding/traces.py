"""Records what preparing a model changes on its modules and parameters, so that the changes can be undone.

Our hooks and replaced methods are recognised by the Python module that defines them. Changes to existing attributes (a class,
an HF flag, a compiled call) are found by comparing the model before and after it is prepared.
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
    """The changes on one model, keyed by module and parameter names; holds no reference to either."""

    _attributes: dict[tuple[str, str], tuple[Any, Any]] = field(default_factory=dict)
    _classes: dict[str, tuple[type, type]] = field(default_factory=dict)
    _frozen: dict[str, tuple[bool, bool]] = field(default_factory=dict)

    @classmethod
    def between(cls, before: Mapping[str, Any], model: nn.Module) -> Traces:
        """The changes on `model` since `before`, an earlier result of `look`. Local."""
        after, traces = look(model), cls()
        for name in before["classes"].keys() & after["classes"].keys():
            if (pair := (before["classes"][name], after["classes"][name]))[0] is not pair[1]:
                traces._classes[name] = pair
            old, new = before["attributes"][name], after["attributes"][name]
            for key in old.keys() | new.keys():
                one, other = old.get(key, _ABSENT), new.get(key, _ABSENT)
                new_and_ours = one is _ABSENT and (_is_ours(other) or _is_ours(type(other)))
                if one is not other and not new_and_ours:  # new ones of ours are recognised without a record
                    traces._attributes[name, key] = one, other
        for name in before["trains"].keys() & after["trains"].keys():
            if before["trains"][name] != after["trains"][name]:
                traces._frozen[name] = before["trains"][name], after["trains"][name]
        return traces

    def undo(self, model: nn.Module) -> None:
        """Undo the changes, except on attributes that somebody else has changed since. Local."""
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
                module.__dict__.pop("_is_fsdp_managed_module", None)  # set together with it, after the comparison
            for key in [key for key, value in module.__dict__.items() if _is_ours(value) or _is_ours(type(value))]:
                del module.__dict__[key]


def look(model: nn.Module) -> dict[str, dict[str, Any]]:
    """A snapshot for `Traces.between` to compare. Local; reads no tensor elements."""
    modules = dict(model.named_modules())
    return {
        "classes": {name: type(module) for name, module in modules.items()},
        "attributes": {name: _own(module) for name, module in modules.items()},
        "trains": {name: param.requires_grad for name, param in model.named_parameters()},
    }


def _own(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in module.__dict__.items() if key not in _PARTS and "_hooks" not in key}


def remove_hooks(owner: nn.Module | torch.Tensor) -> None:
    """Remove our hooks from a module or a parameter. Local."""
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
    # torch wraps load_state_dict hooks.
    value = getattr(value, "hook", value)
    return str(getattr(value, "__module__", "")).startswith("hf_dist.")
