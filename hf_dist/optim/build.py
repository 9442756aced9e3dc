"""Build the optimizer of the `optimizer` section by DeepSpeed's naming rules, on torch's own classes.

Sources: DeepSpeed runtime/engine.py (`_configure_basic_optimizer`), ops/adam, ops/adagrad, ops/lion.
The helpers that turn a JSON type and its params into a torch class serve `schedules.py` as well.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from hf_dist.errors import ConfigError, Problem
from hf_dist.optim.bias_correction import leave_out_bias_correction
from hf_dist.optim.lion import Lion

__all__ = ["build_optimizer"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Names DeepSpeed matches in any case; every other name is an exact attribute of torch.optim.
_ANY_CASE = {"adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad", "lion": "Lion"}

_ONE_BIT = ("compresses gradients to one bit, which is not available", 'Use "AdamW".')
_MU_P = ("needs the per-layer widths of muP, which are not available", "Use the torch optimizer of the same family.")
_REFUSED_TYPES = {
    "onebitadam": _ONE_BIT,
    "zerooneadam": _ONE_BIT,
    "onebitlamb": _ONE_BIT,
    "muadam": _MU_P,
    "muadamw": _MU_P,
    "musgd": _MU_P,
    "lamb": ("needs the norm of the whole tensor, of which a rank holds a fragment; not available", 'Use "AdamW".'),
    "muon": ("orthogonalizes the whole matrix, of which a rank holds a fragment; not available yet", 'Use "AdamW".'),
}

_ONE_BIT_KEYS = (
    *("freeze_step", "cuda_aware", "comm_backend_name", "var_freeze_step", "var_update_scaler", "local_step_scaler"),
    *("local_step_clipper", "coeff_beta", "factor_max", "factor_min", "factor_threshold"),
)
_LAMB_KEYS = ("max_coeff", "min_coeff", "eps_inside_sqrt")

# Keys of DeepSpeed's kernels that torch has no word for, with the only value torch can honour (None: any).
_KERNEL_KEYS: dict[str, dict[str, bool | None]] = {
    "Adam": {"fp32_optimizer_states": True, "set_grad_none": None},
    "AdamW": {"fp32_optimizer_states": True, "set_grad_none": None},
    "Adagrad": {"fp32_optimizer_states": True},
    "Lion": {"fp32_optimizer_states": True, "set_grad_none": None},
}
_ADAM_SWITCHES = {"torch_adam": False, "adam_w_mode": True, "bias_correction": True}
"""DeepSpeed's switches of Adam and their defaults."""

# "meta": the parameters are not placed yet, and both places they can go to have the kernels.
_FUSED_DEVICES = {"cpu", "cuda", "meta"}


def build_optimizer(
    type: str,
    params: Mapping[str, Any],
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
) -> torch.optim.Optimizer:
    """The torch optimizer that `optimizer.type` and `optimizer.params` stand for in DeepSpeed.

    "Adam" and "AdamW" both decay weights decoupled from the gradient, unless "Adam" comes with
    `adam_w_mode: false`; their `weight_decay` is 0 unless given (with `torch_adam`: the default of torch).
    Classes with a fused kernel use it unless `foreach` or `fused` is given. No "auto" may be left in `params`.

    Whether the optimizer can step fragments of a tensor is the question of `check_elementwise`, not of this.

    Raises:
        ConfigError: an unknown or unavailable type, or params it does not take; names all of them.
    """
    if type.lower() in _REFUSED_TYPES:
        expected, fix = _REFUSED_TYPES[type.lower()]
        raise ConfigError(Problem("optimizer.type", repr(type), expected, fix))
    name = _ANY_CASE.get(type.lower(), type)
    switches = {key: read_flag("optimizer", params, key, default) for key, default in _ADAM_SWITCHES.items()}
    torch_adam, adam_w_mode = switches["torch_adam"], switches["adam_w_mode"]
    cls = _optimizer_class(name, adam_w_mode=adam_w_mode)
    accepted = _accepted(name, cls)
    problems = [p for key in params if key not in accepted and (p := _foreign_key(key))]
    own = {key: value for key, value in params.items() if key in accepted or not _foreign_key(key)}
    problems += _kernel_problems(name, own, torch_adam=torch_adam)
    arguments, more = checked_arguments("optimizer", cls, own, accepted)
    if problems + more:
        raise ConfigError(problems + more)

    without_effect = [key for key, value in _KERNEL_KEYS.get(name, {}).items() if value is None and key in params]
    if without_effect:
        logger.warning("optimizer.params: %s has no effect with %s", ", ".join(without_effect), cls.__name__)
    for key in (*_KERNEL_KEYS.get(name, {}), *_ADAM_SWITCHES):
        arguments.pop(key, None)
    if name in ("Adam", "AdamW") and not torch_adam:
        arguments.setdefault("weight_decay", 0.0)  # torch.optim.AdamW alone would decay by 0.01
    groups = _as_groups(parameters)
    if _wants_fused(cls, arguments, groups):
        arguments["fused"] = True
    optimizer = construct("optimizer", cls, groups, arguments)
    if name in ("Adam", "AdamW") and not switches["bias_correction"]:
        leave_out_bias_correction(optimizer)
    return optimizer


def _optimizer_class(name: str, *, adam_w_mode: bool) -> type[torch.optim.Optimizer]:
    if name == "Lion":
        return Lion
    if name == "Adam":  # "AdamW" stays decoupled whatever adam_w_mode says
        return torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return find_class("optimizer", name, torch.optim, torch.optim.Optimizer, others=[*_ANY_CASE.values()])


def _accepted(name: str, cls: type[torch.optim.Optimizer]) -> list[str]:
    """The keys `optimizer.params` may hold, in the order of the constructor."""
    # decoupled_weight_decay is how torch spells AdamW inside Adam: here adam_w_mode says it.
    own = [key for key in argument_names(cls) if key != "decoupled_weight_decay"]
    return own + [*_KERNEL_KEYS.get(name, ())] + ([*_ADAM_SWITCHES] if name in ("Adam", "AdamW") else [])


def _foreign_key(key: str) -> Problem | None:
    """The problem with a key that DeepSpeed knows, but not as a parameter of this optimizer."""
    path = f"optimizer.params.{key}"
    if key == "max_grad_norm":
        return Problem(path, "", "does not clip anything", "Set the top-level key gradient_clipping instead.")
    if key in _ONE_BIT_KEYS:
        return Problem(path, "", "belongs to the 1-bit optimizers, which are not available", "Remove it.")
    if key in _LAMB_KEYS:
        return Problem(path, "", "belongs to LAMB, which is not available", "Remove it.")
    return None


def _kernel_problems(name: str, params: Mapping[str, Any], *, torch_adam: bool) -> list[Problem]:
    """The settings of DeepSpeed's kernels that ask for something torch's kernels do not do."""
    problems = [
        Problem(
            f"optimizer.params.{key}", repr(params[key]), f"is not available, only {str(only).lower()} is", "Remove it."
        )
        for key, only in _KERNEL_KEYS.get(name, {}).items()
        if only is not None and key in params and params[key] != only
    ]
    if name in ("Adam", "AdamW") and params.get("amsgrad") and not torch_adam:
        fix = 'Add "torch_adam": true to optimizer.params.'
        problems.append(Problem("optimizer.params.amsgrad", "true", "is refused by DeepSpeed's own Adam", fix))
    return problems


def _as_groups(parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Param groups whose parameters are lists, because they are read twice: for their device, and by the class."""
    groups: list[dict[str, Any]] = []
    plain: list[nn.Parameter] = []
    for item in parameters:
        if isinstance(item, dict):
            params = item["params"]
            groups.append({**item, "params": [params] if isinstance(params, torch.Tensor) else list(params)})
        else:
            plain.append(item)
    return [{"params": plain}, *groups] if plain else groups


def _wants_fused(cls: type, arguments: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> bool:
    """Whether to ask for the fused kernel: the class has one, the user chose none, the device runs it."""
    if "fused" not in argument_names(cls) or arguments.get("differentiable"):
        return False
    if arguments.get("fused") is not None or arguments.get("foreach") is not None:
        return False
    return {p.device.type for group in groups for p in group["params"]} <= _FUSED_DEVICES


def find_class(section: str, name: str, module: ModuleType, base: type[T], *, others: Iterable[str]) -> type[T]:
    """The subclass of `base` called exactly `name` in `module`; else a ConfigError that suggests a name."""
    found = getattr(module, name, None) if not name.startswith("_") else None
    if inspect.isclass(found) and issubclass(found, base) and found is not base:
        return found
    public = (n for n, c in vars(module).items() if inspect.isclass(c) and issubclass(c, base) and c is not base)
    known = sorted({*others, *(n for n in public if not n.startswith("_"))})
    raise ConfigError(
        Problem(
            f"{section}.type",
            repr(name),
            f"is not one of {', '.join(known)}",
            suggestion(name, known),
        )
    )


def suggestion(name: str, known: Iterable[str]) -> str:
    """`Did you mean X?`, or nothing when no known name is near; case does not count as a difference."""
    by_lower = {k.lower(): k for k in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f'Did you mean "{by_lower[near[0]]}"?' if near else ""


def argument_names(cls: type) -> list[str]:
    """Names of the constructor's arguments after the first one (the parameters, or the optimizer)."""
    return list(inspect.signature(cls).parameters)[1:]


def read_flag(section: str, params: Mapping[str, Any], key: str, default: bool) -> bool:
    """`params[key]` as a bool; a ConfigError for anything else, because "false" in quotes would count as true."""
    value = params.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(Problem(f"{section}.params.{key}", repr(value), "is not true or false", ""))
    return value


def checked_arguments(
    section: str, cls: type, params: Mapping[str, Any], accepted: Sequence[str]
) -> tuple[dict[str, Any], list[Problem]]:
    """`params` as keyword arguments of `cls` (lists become tuples where it has tuples), and what is wrong with them."""
    defaults = {key: parameter.default for key, parameter in inspect.signature(cls).parameters.items()}
    arguments: dict[str, Any] = {}
    problems: list[Problem] = []
    for key, value in params.items():
        path = f"{section}.params.{key}"
        if key not in accepted:
            fix = suggestion(key, accepted)
            problems.append(Problem(path, "", f"is not a parameter; accepted are {', '.join(accepted)}", fix))
            continue
        default = defaults.get(key)
        is_number = isinstance(default, (int, float)) and not isinstance(default, bool)
        if is_number and isinstance(value, str):
            problems.append(Problem(path, repr(value), "is not a number", "Write the number without quotes."))
        if isinstance(default, tuple) and isinstance(value, (list, tuple)):
            # torch wants floats: the 0 of "betas": [0, 0.99] is an int in JSON
            value = tuple(float(v) if isinstance(v, int) else v for v in value)
        arguments[key] = value
    return arguments, problems


def construct(section: str, cls: Callable[..., T], first: Any, arguments: Mapping[str, Any]) -> T:
    """`cls(first, **arguments)`, with whatever it refuses as a ConfigError naming the section."""
    try:
        return cls(first, **arguments)
    except ConfigError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        name = getattr(cls, "__name__", repr(cls))
        raise ConfigError(
            Problem(f"{section}.params", repr(dict(arguments)), f"is refused by {name}: {error}", "")
        ) from error
