"""Types and arguments of the `optimizer` and `scheduler` sections: valid names and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hf_dist.config import accepts, values
from hf_dist.config.arguments import DEEPSPEED_SCHEDULES, OPTIMIZER_ARGUMENTS, REQUIRED, TORCH_SCHEDULES
from hf_dist.config.findings import Findings
from hf_dist.config.foreign_keys import INSTEAD
from hf_dist.config.keys import is_comment
from hf_dist.config.rows import Status
from hf_dist.config.spelling import closest, did_you_mean, same_words
from hf_dist.config.support import SUPPORT

TYPE_PREFIXES = ("torch.optim.", "lr_scheduler.")
"""What may stand before the name of a class."""
REFUSED_OPTIMIZERS: Mapping[str, str] = {
    **{name: "is not supported: it needs the mup package" for name in ("MuAdam", "MuAdamW", "MuSGD")},
    "LBFGS": "is not supported: it searches along a direction of all parameters at once",
    "SparseAdam": "is not supported: gradients are dense here",
}
"""Optimizers that are known but not supported, with the clause that says why."""
_NEAREST: Mapping[str, str] = {
    "MuAdam": "Adam",
    "MuSGD": "SGD",
}
"""The nearest supported optimizer; AdamW for all others."""

_NEEDS_CODE = "needs Python objects, which a JSON file cannot hold"
REFUSED_SCHEDULES: Mapping[str, str] = {
    **{name: _NEEDS_CODE for name in ("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler")},
    "ReduceLROnPlateau": "needs a metric at every step, which the training loop does not give",
}
"""Schedules that are known but not supported, with the clause that says why."""

_LR = values.or_auto(values.real())
OPTIMIZER_VALUES: Mapping[str, values.Coerce] = {
    **dict.fromkeys(("lr", "eps", "weight_decay"), _LR),
    "betas": values.or_auto(values.pair(values.real(below=1.0))),
    **dict.fromkeys(("momentum", "rho", "alpha", "lambd", "t0", "lr_decay", "momentum_decay"), values.real()),
    **dict.fromkeys(("etas", "step_sizes"), values.pair(values.real())),
    "initial_accumulator_value": values.real(),
    **dict.fromkeys(("muon_lr", "adam_lr", "max_coeff", "min_coeff", "clip_threshold", "beta1"), values.real()),
    "decay_rate": values.real(-10.0),
    **dict.fromkeys(("eps_inside_sqrt", "scale_parameter", "relative_step", "warmup_init"), values.flag),
    **dict.fromkeys(("freeze_step", "var_freeze_step", "var_update_scaler"), values.whole(1)),
    **dict.fromkeys(("coeff_beta", "factor_threshold"), values.real(below=1.0)),
    **dict.fromkeys(("factor_max", "factor_min"), values.real()),
    "adjust_lr_fn": values.choice("original", "match_rms_adamw"),
    "ns_dtype": values.choice("bf16", "fp32"),
    "dampening": values.real(),
    **dict.fromkeys(("torch_adam", "adam_w_mode", "bias_correction", "amsgrad", "nesterov", "centered"), values.flag),
    **dict.fromkeys(("maximize", "capturable", "differentiable", "decoupled_weight_decay"), values.flag),
    **dict.fromkeys(("foreach", "fused", "fp32_optimizer_states"), values.flag),
}
OWN_VALUES: Mapping[tuple[str, str], values.Coerce] = {("Adafactor", "eps"): values.pair(values.real())}
"""(optimizer, argument) -> coercion, for names with a special meaning in that optimizer."""
_RATE = values.reals()
SCHEDULER_VALUES: Mapping[str, values.Coerce] = {
    "warmup_min_lr": values.or_auto(_RATE),
    "warmup_max_lr": values.or_auto(_RATE),
    "warmup_num_steps": values.or_auto(values.whole()),
    "total_num_steps": values.or_auto(values.whole(1)),
    "warmup_type": values.choice("log", "linear"),
    "warmup_min_ratio": values.real(),
    "cos_min_ratio": values.real(),
    "last_batch_iteration": values.whole(-1),
    "last_epoch": values.whole(-1),
    **dict.fromkeys(("cycle_min_lr", "cycle_max_lr", "lr_range_test_min_lr", "max_lr", "base_lr"), _RATE),
    **dict.fromkeys(("decay_lr_rate", "decay_mom_rate", "lr_range_test_step_rate"), values.real()),
    **dict.fromkeys(("cycle_min_mom", "cycle_max_mom", "base_momentum", "max_momentum"), _RATE),
    **dict.fromkeys(("cycle_first_step_size", "cycle_second_step_size", "lr_range_test_step_size"), values.whole(1)),
    **dict.fromkeys(("cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size"), values.whole()),
    **dict.fromkeys(("cycle_momentum", "lr_range_test_staircase", "three_phase"), values.flag),
    **dict.fromkeys(("T_max", "T_0", "T_mult", "step_size", "total_iters", "step_size_up"), values.whole(1)),
    **dict.fromkeys(("step_size_down", "total_steps", "epochs", "steps_per_epoch"), values.whole(1)),
    **dict.fromkeys(("gamma", "eta_min", "factor", "start_factor", "end_factor", "power"), values.real()),
    **dict.fromkeys(("pct_start", "div_factor", "final_div_factor"), values.real()),
    "milestones": values.wholes(),
    "anneal_strategy": values.choice("cos", "linear"),
    "mode": values.choice("triangular", "triangular2", "exp_range"),
    "scale_mode": values.choice("cycle", "iterations"),
}


def checked_optimizer(section: Any, findings: Findings) -> dict[str, Any] | None:
    """The `optimizer` section with canonical type and numbers as numbers; None if it is absent or unusable."""
    name = _type(section, "optimizer", tuple(OPTIMIZER_ARGUMENTS), REFUSED_OPTIMIZERS, findings)
    if name is None:
        return None
    known = OPTIMIZER_ARGUMENTS[name]
    result: dict[str, Any] = {}
    for key, value in _params(section, "optimizer", findings).items():
        path = f"optimizer.params.{key}"
        row = SUPPORT.get(path)
        if row is not None and row.status is Status.REFUSED:
            if not row.accepted(value):
                findings.problem(path, row.reason, row.fix, found=value)
        elif key not in known:
            _not_a_parameter(path, name, tuple(known), findings)
        elif row is not None and row.status is Status.NO_EFFECT:
            if not row.accepted(value):
                findings.note(path, row.reason)
        else:
            _keep(result, path, OWN_VALUES.get((name, key)) or OPTIMIZER_VALUES.get(key, plain), value, findings)
    if result.get("amsgrad") and name in ("Adam", "AdamW") and not result.get("torch_adam"):
        fix = 'Add "torch_adam": true to "optimizer.params".'
        findings.problem("optimizer.params.amsgrad", 'needs "torch_adam"', fix, found=True)
    return {"type": name, "params": result}


def checked_scheduler(section: Any, findings: Findings) -> dict[str, Any] | None:
    """The `scheduler` section with canonical type and numbers as numbers; None if it is absent or unusable."""
    served = {**DEEPSPEED_SCHEDULES, **TORCH_SCHEDULES}
    name = _type(section, "scheduler", tuple(served), REFUSED_SCHEDULES, findings)
    if name is None:
        return None
    params = _params(section, "scheduler", findings)
    result: dict[str, Any] = {}
    for key, value in params.items():
        path = f"scheduler.params.{key}"
        if key in served[name]:
            coerce = SCHEDULER_VALUES[key]
            coerce = values.needed(coerce) if key in REQUIRED.get(name, ()) else coerce
            _keep(result, path, coerce, value, findings)
        else:
            _not_a_parameter(path, name, served[name], findings)
    for key in REQUIRED.get(name, ()):
        if key not in params:
            example = '"auto"' if key == "total_num_steps" else "..."
            findings.problem(f"scheduler.params.{key}", f"is missing; {name} needs it", f'Add "{key}": {example}.')
    return {"type": name, "params": result}


def read_optimizer(type: str, params: Mapping[str, object]) -> tuple[str, dict[str, Any]]:
    """Canonical type and parameters of an optimizer, as in the section. Raises `ConfigError` with all problems."""
    return _read("optimizer", checked_optimizer, type, params)


def read_scheduler(type: str, params: Mapping[str, object]) -> tuple[str, dict[str, Any]]:
    """Canonical type and parameters of a schedule, as in the section. Raises `ConfigError` with all problems."""
    return _read("scheduler", checked_scheduler, type, params)


def _read(
    path: str,
    check: Callable[[Any, Findings], dict[str, Any] | None],
    type: str,
    params: Mapping[str, object],
) -> tuple[str, dict[str, Any]]:
    findings = Findings()
    section = check({"type": type, "params": params}, findings)
    for key, value in (section or {}).get("params", {}).items():
        if values.is_auto(value):
            findings.problem(f"{path}.params.{key}", "has not been filled in", "Write a value.", found=value)
    findings.raise_if_any()
    assert section is not None  # otherwise a problem was recorded
    return section["type"], section["params"]


def _not_a_parameter(path: str, name: str, known: tuple[str, ...], findings: Findings) -> None:
    key = path.rpartition(".")[2]
    if is_comment(key):
        findings.note(path, "a comment", "comment")
        return
    meant = INSTEAD.get(key, "").removeprefix(f"{path.rpartition('.')[0]}.") or same_words(key, sorted(known))
    if meant in known:
        findings.problem(path, f"is not a parameter of {name}", f'Did you mean "{meant}"?')
        return
    fix = did_you_mean(key, known, f"Remove it; the parameters are {', '.join(sorted(known))}.")
    findings.problem(path, f"is not a parameter of {name}", fix)


def _type(
    section: object, path: str, served: tuple[str, ...], refused: Mapping[str, str], findings: Findings
) -> str | None:
    """The requested class. For a wrong name, the class that its remedy names, so that parameters are checked too."""
    if not isinstance(section, Mapping):
        return None
    where = f"{path}.type"
    if "type" not in section:
        findings.problem(where, "is missing", f"Add it (for example {served[1]}), or remove the section.")
        return None
    value = section["type"]
    names = {name.lower(): name for name in (*served, *refused)}
    plain_name = str(value).strip().lower()
    for prefix in TYPE_PREFIXES:
        plain_name = plain_name.removeprefix(prefix)
    name = names.get(plain_name)
    if name in served:
        return name
    others = f"Remove the section, or use one of {', '.join(served)}, with its own parameters."
    if name is None:
        meant = closest(str(value), names.values())
        findings.problem(where, f"is not a known {path}", f'Did you mean "{meant}"?' if meant else others, found=value)
        return meant if meant in served else None
    nearest = _NEAREST.get(name, "AdamW") if path == "optimizer" else None
    fix = f'Use "{nearest}" or another of {", ".join(served)}.' if nearest else others
    findings.problem(where, refused[name], fix, found=value)
    return nearest


def _params(section: Mapping[str, object], path: str, findings: Findings) -> Mapping[str, object]:
    params = section.get("params", {})
    if isinstance(params, Mapping):
        return {key: value for key, value in params.items() if value is not None}
    return {}


@accepts.taking({"not": {"type": "string", "pattern": accepts.any_case("auto")}})
def plain(value: object) -> Any:
    """The value as written: torch checks it."""
    if values.is_auto(value):
        raise values.nobody_fills()
    return value


def _keep(result: dict[str, object], path: str, coerce: values.Coerce, value: object, findings: Findings) -> None:
    try:
        read = coerce(value)
    except values.BadValue as bad:
        findings.problem(path, bad.clause, bad.fix, found=value)
        return
    result[path.rpartition(".")[2]] = read
    if isinstance(value, str) and isinstance(read, (int, float)):
        findings.note(path, f"{values.shown(value)} is read as {values.shown(read)}", "read")
