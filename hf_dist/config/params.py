"""Types and arguments of the `optimizer` and `scheduler` sections: which names exist, which values fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_dist.config import values
from hf_dist.config.findings import Findings
from hf_dist.config.keys import is_comment, known_keys
from hf_dist.config.spelling import closest
from hf_dist.config.support import SUPPORT, Status

OPTIMIZERS = (
    *("Adam", "AdamW", "Adagrad", "Lion", "SGD", "Adadelta"),
    *("Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"),
)
"""Accepted `optimizer.type`: Lion, and the classes of torch.optim that treat each element on its own."""

_WHOLE_TENSOR = "looks at whole tensors, which are split here"
REFUSED_OPTIMIZERS: Mapping[str, str] = {
    **{name: "is a 1-bit optimizer, which is not supported" for name in ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")},
    **{name: "is not supported: it needs the mup package" for name in ("MuAdam", "MuAdamW", "MuSGD")},
    **{name: f"is not available yet in this version of hf_dist: it {_WHOLE_TENSOR}" for name in ("Lamb", "Muon")},
    **{name: f"is not supported: it {_WHOLE_TENSOR}" for name in ("Adafactor", "LBFGS")},
    "SparseAdam": "is not supported: gradients are dense here",
}
"""Optimizers known by name and not served, with the clause that says why."""

_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration")
WARMUP_SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": ("total_num_steps", *_WARMUP),
    "WarmupCosineLR": ("total_num_steps", "warmup_min_ratio", "cos_min_ratio", *_WARMUP[2:]),
}
"""DeepSpeed's schedules that exist here, with their arguments."""

TORCH_SCHEDULES = (
    *("ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts"),
    *("StepLR", "MultiStepLR", "CyclicLR", "OneCycleLR"),
)
"""Classes of torch.optim.lr_scheduler that a JSON file can describe."""

_NEEDS_CODE = "needs Python objects, which a JSON file cannot hold"
REFUSED_SCHEDULES: Mapping[str, str] = {
    **{name: "is not available yet in this version of hf_dist" for name in ("OneCycle", "LRRangeTest")},
    **{name: _NEEDS_CODE for name in ("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler")},
    "ReduceLROnPlateau": "needs a metric at every step, which the training loop does not give",
}
"""Schedules known by name and not served, with the clause that says why."""

_OPTIMIZER_VALUES: Mapping[str, values.Coerce] = {
    "lr": values.or_auto(values.real()),
    "betas": values.or_auto(values.pair(values.real(below=1.0))),
    "eps": values.or_auto(values.real()),
    "weight_decay": values.or_auto(values.real()),
    "momentum": values.real(),
    "adam_w_mode": values.flag,
    "torch_adam": values.flag,
    "amsgrad": values.flag,
}
_SCHEDULER_VALUES: Mapping[str, values.Coerce] = {
    "warmup_min_lr": values.or_auto(values.reals()),
    "warmup_max_lr": values.or_auto(values.reals()),
    "warmup_num_steps": values.or_auto(values.whole()),
    "total_num_steps": values.or_auto(values.whole(1)),
    "warmup_type": values.choice("log", "linear"),
    "warmup_min_ratio": values.real(),
    "cos_min_ratio": values.real(),
    "last_batch_iteration": values.whole(-1),
}
_TORCH_ARGUMENTS = frozenset(
    {
        *(
            "alpha",
            "capturable",
            "centered",
            "dampening",
            "decoupled_weight_decay",
            "differentiable",
            "etas",
            "foreach",
        ),
        *("fused", "initial_accumulator_value", "lambd", "lr_decay", "maximize", "momentum_decay", "nesterov", "rho"),
        *("step_sizes", "t0"),
    }
)


def checked_optimizer(section: Any, findings: Findings) -> dict[str, Any] | None:
    """The `optimizer` section with canonical type and numbers as numbers; None when it is absent or unusable."""
    name = _type(section, "optimizer", OPTIMIZERS, REFUSED_OPTIMIZERS, findings)
    if name is None:
        return None
    params = _params(section, "optimizer", findings)
    known = known_keys("optimizer.params") | _TORCH_ARGUMENTS
    result: dict[str, Any] = {}
    for key, value in params.items():
        path = f"optimizer.params.{key}"
        row = SUPPORT.get(path)
        if row is not None and row.status is Status.REFUSED:
            if not row.accepted(value):
                findings.problem(path, row.reason, row.fix, found=value)
        elif row is not None and row.status is Status.NO_EFFECT:
            if not row.accepted(value):
                findings.note(path, row.reason)
        elif is_comment(key):
            findings.note(path, "a comment", comment=True)
        elif key not in known and (meant := closest(key, known)):
            findings.problem(path, f"is not a parameter of {name}", f'Did you mean "{meant}"?')
        else:
            _keep(result, path, _OPTIMIZER_VALUES.get(key, _plain), value, findings)
    if result.get("amsgrad") and name in ("Adam", "AdamW") and not result.get("torch_adam"):
        fix = 'Add "torch_adam": true to "optimizer.params".'
        findings.problem("optimizer.params.amsgrad", 'needs "torch_adam"', fix, found=True)
    return {"type": name, "params": result}


def checked_scheduler(section: Any, findings: Findings) -> dict[str, Any] | None:
    """The `scheduler` section with canonical type and numbers as numbers; None when it is absent or unusable."""
    served = (*WARMUP_SCHEDULES, *TORCH_SCHEDULES)
    name = _type(section, "scheduler", served, REFUSED_SCHEDULES, findings)
    if name is None:
        return None
    params = _params(section, "scheduler", findings)
    allowed = WARMUP_SCHEDULES.get(name)
    result: dict[str, Any] = {}
    for key, value in params.items():
        path = f"scheduler.params.{key}"
        if is_comment(key):
            findings.note(path, "a comment", comment=True)
        elif allowed is not None and key not in allowed:
            meant = closest(key, allowed)
            fix = f'Did you mean "{meant}"?' if meant else f"Remove it; the parameters are {', '.join(allowed)}."
            findings.problem(path, f"is not a parameter of {name}", fix)
        else:
            _keep(result, path, _SCHEDULER_VALUES.get(key, _plain), value, findings)
    if allowed is not None and "total_num_steps" in allowed and "total_num_steps" not in params:
        findings.problem(
            "scheduler.params.total_num_steps", f"is missing; {name} needs it", 'Add "total_num_steps": "auto".'
        )
    return {"type": name, "params": result}


def _type(
    section: Any, path: str, served: tuple[str, ...], refused: Mapping[str, str], findings: Findings
) -> str | None:
    if not isinstance(section, Mapping):
        return None
    where = f"{path}.type"
    if "type" not in section:
        findings.problem(where, "is missing", f"Add it (for example {served[1]}), or remove the section.")
        return None
    value = section["type"]
    names = {name.lower(): name for name in (*served, *refused)}
    name = names.get(str(value).strip().lower().removeprefix("torch.optim.").removeprefix("lr_scheduler."))
    if name is None:
        meant = closest(str(value), names.values())
        fix = f'Did you mean "{meant}"?' if meant else f"Use one of {', '.join(served)}."
        findings.problem(where, f"is not a known {path}", fix, found=value)
    elif name in refused:
        findings.problem(where, refused[name], f"Use one of {', '.join(served)}.", found=value)
    else:
        return name
    return None


def _params(section: Mapping[str, Any], path: str, findings: Findings) -> Mapping[str, Any]:
    params = section.get("params", {})
    if isinstance(params, Mapping):
        return {key: value for key, value in params.items() if value is not None}
    return {}


def _plain(value: Any) -> Any:
    if values.is_auto(value):
        raise values.nobody_fills()
    return value


def _keep(result: dict[str, Any], path: str, coerce: values.Coerce, value: Any, findings: Findings) -> None:
    try:
        result[path.rpartition(".")[2]] = coerce(value)
    except values.BadValue as bad:
        findings.problem(path, bad.clause, bad.fix, found=value)
