"""Records what preparing a model changes on its modules and parameters, so that the changes can be undone.

Our hooks and replaced methods are recognised by the Python module that defines them. Changes to existing attributes (a class,
an HF flag, a compiled call) are found by comparing the model before and after it is prepared.
"""

from __future__ import annotations

import copy
import functools
import weakref
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
    """Of the modules and parameters of one model, which it holds weakly: they may be parts of another one by now."""

    _attributes: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[object, object]]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    _classes: weakref.WeakKeyDictionary[nn.Module, tuple[type, type]] = field(default_factory=weakref.WeakKeyDictionary)
    _frozen: list[tuple[weakref.ref[nn.Parameter], bool, bool]] = field(default_factory=list)

    @classmethod
    def between(cls, before: Mapping[str, Any], model: nn.Module) -> Traces:
        """The changes on `model` since `before`, an earlier result of `look`. Local."""
        after, traces = look(model), cls()
        for module in before["classes"].keys() & after["classes"].keys():
            if (pair := (before["classes"][module], after["classes"][module]))[0] is not pair[1]:
                traces._classes[module] = pair
            old, new = before["attributes"][module], after["attributes"][module]
            for key in old.keys() | new.keys():
                one, other = old.get(key, _ABSENT), new.get(key, _ABSENT)
                new_and_ours = one is _ABSENT and (_is_ours(other) or _is_ours(type(other)))
                if one is not other and not new_and_ours:  # those are known without it; the keeper of this is one
                    traces._attributes.setdefault(module, {})[key] = one, other
        for number, (param, trained) in before["trains"].items():
            if number in after["trains"] and after["trains"][number][1] != trained:
                traces._frozen.append((weakref.ref(param), trained, not trained))
        return traces

    def undo(self, model: nn.Module) -> None:
        """Put back what nobody has changed since, on `model` and on what has left it. Local."""
        for module, (cls, ours) in self._classes.items():
            if type(module) is ours:
                module.__class__ = cls
        for module in self._attributes:
            self._put_back(module, module.__dict__)
        for reference, trained, ours_trains in self._frozen:
            param = reference()
            if param is not None and param.requires_grad == ours_trains:
                param.requires_grad_(trained)
        for module in model.modules():
            remove_hooks(module)
            _remove_ours(module.__dict__)

    def ordinary_twin(self, module: nn.Module) -> nn.Module:
        """A module like `module` before it was prepared, with the same parameters, buffers and submodules. Local."""
        cls, ours = self._classes.get(module, (None, None))
        twin: nn.Module = object.__new__(cls if cls is not None and type(module) is ours else type(module))
        own = {key: copy.copy(value) if "_hooks" in key else value for key, value in module.__dict__.items()}
        self._put_back(module, own)
        twin.__dict__.update(own)
        remove_hooks(twin)
        _remove_ours(twin.__dict__)
        return twin

    def trained_before(self) -> dict[int, bool]:
        """Whether parameters were trained before preparing changed that, by the number (`id`) of a parameter. Local."""
        return {id(param): trained for reference, trained, _ in self._frozen if (param := reference()) is not None}

    def _put_back(self, module: nn.Module, own: dict[str, object]) -> None:
        """In `own`, the attributes of `module` or of its twin."""
        for key, (value, ours) in self._attributes.get(module, {}).items():
            if own.get(key, _ABSENT) is ours and value is not ours:
                if value is _ABSENT:
                    del own[key]
                else:
                    own[key] = value


def _remove_ours(own: dict[str, object]) -> None:
    if _is_ours(type(own.get("generate"))):
        own.pop("_is_fsdp_managed_module", None)  # set together with it, after the comparison
    for key in [key for key, value in own.items() if _is_ours(value) or _is_ours(type(value))]:
        del own[key]


def look(model: nn.Module) -> dict[str, dict[object, Any]]:
    """What `Traces.between` compares: by module, and by the number of a parameter. Local, without a look at an element."""
    modules = list(model.modules())
    return {
        "classes": {module: type(module) for module in modules},
        "attributes": {module: _own(module) for module in modules},
        "trains": {id(param): (param, param.requires_grad) for param in model.parameters()},
    }


def _own(module: nn.Module) -> dict[str, object]:
    return {key: value for key, value in module.__dict__.items() if key not in _PARTS and "_hooks" not in key}


def remove_hooks(owner: nn.Module | torch.Tensor) -> None:
    """Remove our hooks from a module or a parameter. Local."""
    names = owner.__dict__ if isinstance(owner, nn.Module) else ("_backward_hooks", "_post_accumulate_grad_hooks")
    found = [(name, getattr(owner, name, None)) for name in names if "_hooks" in name]
    kept: list[dict[int, object]] = [hooks for _, hooks in found if isinstance(hooks, dict)]
    ours = {number for hooks in kept for number, hook in hooks.items() if _is_ours(hook)}
    for hooks in kept:
        for number in ours & hooks.keys():
            del hooks[number]


def _is_ours(value: object) -> bool:
    while isinstance(value, functools.partial):
        value = value.func
    # torch wraps load_state_dict hooks.
    value = getattr(value, "hook", value)
    return str(getattr(value, "__module__", "")).startswith("hf_dist.")
