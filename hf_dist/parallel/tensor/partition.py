"""A plan written by the user: `tensor_parallel.partition_config`, DeepSpeed's regular expressions on parameter names.

    {"use_default_specs": false, "layer_specs": [
        {"patterns": ["\\\\.(q|k|v|gate|up)_proj\\\\.weight$"], "partition_type": "column"},
        {"patterns": ["\\\\.gate_up_proj\\\\.weight$"], "partition_type": "column", "shape": [2, -1]},
        {"patterns": ["\\\\.(o|down)_proj\\\\.weight$"], "partition_type": "row"}]}

`shape`: parts of a fused weight, as a number of equal parts or a list of their sizes. The first matching pattern counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from hf_dist.errors import ConfigError, ModelError, Problem
from hf_dist.parallel.tensor.plan import (
    Cut,
    SplitPlan,
    column_dim,
    named_matrices,
    pattern_of,
    plan_of_model,
    row_dim,
)

__all__ = ["plan_of_config"]

PATH = "tensor_parallel.partition_config"
_KEYS = {"use_default_specs", "layer_specs", "strict_mode"}
_SPEC_KEYS = {"patterns", "partition_type", "shape", "partition_dim", "model_types"}


def plan_of_config(model: nn.Module, given: Mapping[str, object]) -> SplitPlan:
    """The plan that `given` describes for `model`, added to the model's own if `use_default_specs` is true.

    Raises `ConfigError` for invalid keys and values, and `ModelError` for a pattern that matches no parameter.
    """
    specs = _specs(given)
    plan = plan_of_model(model) if given.get("use_default_specs") else SplitPlan()
    params, modules = dict(plan.params), dict(plan.modules)
    fits = [False] * len(specs)
    kind = getattr(getattr(model, "config", None), "model_type", None)
    for name, module, short, _ in named_matrices(model):
        if short != "weight" or not (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"):
            continue
        full = f"{name}.{short}"
        for index, spec in enumerate(specs):
            if spec.get("model_types") and kind not in spec["model_types"]:
                fits[index] = True
                continue
            if any(re.search(pattern, full) for pattern in spec["patterns"]):
                fits[index] = True
                _apply(spec, pattern_of(name), module, params, modules)
                break
    for index, spec in enumerate(specs):
        if not fits[index]:
            raise ModelError(f"{PATH}.layer_specs.{index}: no matrix of {type(model).__name__} fits {spec['patterns']}")
    return replace(plan, params=params, modules=modules, source=PATH)


def _apply(
    spec: Mapping[str, object], name: str, module: nn.Module, params: dict[str, Cut], modules: dict[str, str]
) -> None:
    for short in ("weight", "bias"):
        params.pop(f"{name}.{short}", None)
    modules.pop(name, None)
    kind = spec["partition_type"]
    if kind == "column":
        segments = _segments(spec.get("shape"))
        params[f"{name}.weight"] = Cut(column_dim(module), segments)
        if getattr(module, "bias", None) is not None:
            params[f"{name}.bias"] = Cut(-1, segments)
        modules[name] = "colwise"
    elif kind == "row":
        params[f"{name}.weight"] = Cut(row_dim(module))
        modules[name] = "rowwise"


def _segments(shape: Any) -> tuple[int, ...]:
    first = shape[0] if shape else 1
    return tuple(int(n) for n in first) if isinstance(first, list | tuple) else (1,) * int(first)


def _specs(given: Mapping[str, object]) -> list[Mapping[str, Any]]:
    """The entries, each checked."""
    problems = [
        Problem(f"{PATH}.{key}", "", "is not a key here", f"The keys are {', '.join(sorted(_KEYS))}.")
        for key in given
        if key not in _KEYS
    ]
    specs = given.get("layer_specs")
    if not isinstance(specs, list | tuple) or not all(isinstance(spec, Mapping) for spec in specs):
        problems.append(
            Problem(f"{PATH}.layer_specs", "", "is not a list of objects", 'Write [{"patterns": [...], ...}].')
        )
        raise ConfigError(problems)
    for index, spec in enumerate(specs):
        where = f"{PATH}.layer_specs.{index}"
        for key in set(spec) - _SPEC_KEYS:
            problems.append(
                Problem(f"{where}.{key}", "", "is not a key here", f"The keys are {', '.join(sorted(_SPEC_KEYS))}.")
            )
        if spec.get("partition_type") not in ("column", "row", "skip"):
            found = repr(spec.get("partition_type"))
            problems.append(Problem(f"{where}.partition_type", found, 'is not "column", "row" or "skip"', ""))
        dim, right = (
            spec.get("partition_dim"),
            {"column": (0,), "row": (1, -1)}.get(str(spec.get("partition_type")), ()),
        )
        if dim is not None and dim not in right:
            expected = f"is not the dimension of a {spec.get('partition_type')} ({right[0] if right else 'none'})"
            problems.append(Problem(f"{where}.partition_dim", repr(dim), expected, "Remove the key."))
        patterns = spec.get("patterns")
        if not isinstance(patterns, list | tuple) or not patterns:
            problems.append(Problem(f"{where}.patterns", "", "is not a list of regular expressions", ""))
            continue
        for pattern in patterns:
            try:
                re.compile(str(pattern))
            except re.error as error:
                problems.append(
                    Problem(f"{where}.patterns", repr(pattern), f"is not a regular expression: {error}", "")
                )
    if problems:
        raise ConfigError(problems)
    return list(specs)
