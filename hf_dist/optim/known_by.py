"""What an optimizer knows of its parameters beside `params`: it must mean the stand-ins from now on.

Classes keep parameters in lists of their own, as keys of dicts, as sets of `id(p)`, and in lists beside `params` in a group.
bitsandbytes keeps rules for single parameters in a manager. Attributes of a parameter are found through its stand-in.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["follow", "knows_more"]

_TORCHS = ("state", "param_groups", "defaults")
"""What every optimizer has; the caller replaces the parameters there."""
_DEPTH = 4


def follow(optimizer: torch.optim.Optimizer, stands: Mapping[int, torch.Tensor]) -> None:
    """Replace parameters in the attributes and group options of `optimizer`. Local; containers are copied, not changed.

    `stands`: id of a parameter -> what stands for it.
    """
    for holder in _holders(optimizer):
        for key, value in list(holder.items()):
            if key not in _TORCHS and key != "params":
                found = _followed(value, stands, _DEPTH)
                if found is not value:
                    holder[key] = found
    _carry_rules(optimizer, stands)


def knows_more(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` knows parameters, or has an entry for each, outside of `params`. Local."""
    params = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    marks = {key: torch.empty(0) for key in params}
    for holder in _holders(optimizer):
        length = len(holder["params"]) if "params" in holder else 0
        for key, value in holder.items():
            if key in _TORCHS or key in ("params", "betas"):
                continue
            if length > 1 and isinstance(value, (list, tuple)) and len(value) == length:
                return True
            if _followed(value, marks, _DEPTH) is not value:
                return True
    return False


def _holders(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The attributes of an optimizer, and of those it wraps, and the options of each group."""
    found = [vars(optimizer), *optimizer.param_groups]
    inner = [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
    return [*found, *(vars(one) for one in inner if one is not optimizer)]


def _followed(value: object, stands: Mapping[int, torch.Tensor], depth: int) -> object:
    """`value`, or a copy of it in which stand-ins have taken the places of parameters and of their ids."""
    if isinstance(value, torch.Tensor):
        return stands.get(id(value), value)
    if depth == 0 or not isinstance(value, (list, tuple, set, frozenset, dict)) or not value:
        return value
    keys = list(value)
    are_ids = all(isinstance(key, int) and not isinstance(key, bool) and key in stands for key in keys)
    new = [id(stands[key]) if are_ids else _followed(key, stands, depth - 1) for key in keys]
    if isinstance(value, dict):
        items = [_followed(value[key], stands, depth - 1) for key in keys]
        if all(a is b for a, b in zip([*keys, *value.values()], [*new, *items], strict=True)):
            return value
        made = copy.copy(value)  # of its own class
        made.clear()
        for key, item in zip(new, items, strict=True):
            made[key] = item
        return made
    if all(a is b for a, b in zip(keys, new, strict=True)):
        return value
    kind: Any = type(value)
    return kind(*new) if hasattr(value, "_fields") else kind(new)


def _carry_rules(optimizer: torch.optim.Optimizer, stands: Mapping[int, torch.Tensor]) -> None:
    """Transfer bitsandbytes' rules for single parameters to the tensors stepped in their place.

    bitsandbytes finds rules by object or position, and HF registers modules (embeddings keep 32 bits). Its manager is global to
    the process, so the optimizer gets its own.
    """
    manager: Any = getattr(optimizer, "mng", None)
    if not hasattr(manager, "module_weight_config_triple"):
        return
    rules = dict(manager.pid2config)
    rules |= {id(getattr(module, name)): rule for module, name, rule in manager.module_weight_config_triple}
    own: Any = object.__new__(type(manager))
    own.initialize()
    own.pid2config = {id(stands[key]): dict(rule) for key, rule in rules.items() if key in stands}
    optimizer.mng = own  # type: ignore[attr-defined]
