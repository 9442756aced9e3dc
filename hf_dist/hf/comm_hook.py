"""A communication hook of accelerate's `DistributedDataParallelKwargs` as keys of the JSON: the same bytes, by this engine.

    comm_hook FP16, BF16                      communication_data_type
    comm_hook POWER_SGD, BATCHED_POWER_SGD    hf_dist.wires.gradients "powersgd", hf_dist.wires.powersgd, stage 0
    comm_wrapper beside one of these          communication_data_type: factors travel in it

Batched PowerSGD takes all gradients of a bucket for one square matrix. Here each parameter stays a matrix, which keeps more of
it in as many bytes. Sources: accelerate 1.15 `utils/dataclasses.py`; torch `ddp_comm_hooks/powerSGD_hook.py` for the options.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import ValidationError

from hf_dist.config import DistConfig
from hf_dist.config.foreign_layout import ForeignLayout
from hf_dist.config.sections import PowerSgdConfig
from hf_dist.config.spelling import did_you_mean
from hf_dist.errors import ConfigError, Problem
from hf_dist.hf.parallelism import with_layout
from hf_dist.log import say_once

__all__ = ["asks_for_hook", "with_comm_hook"]

_TOOL = "DistributedDataParallelKwargs"
_TYPE = "communication_data_type"
_DTYPES = ("fp16", "bf16")
_WIRES = "hf_dist.wires"
_OPTIONS: Mapping[str, tuple[str, object]] = {
    "matrix_approximation_rank": ("rank", 1),
    "start_powerSGD_iter": ("start_step", 1000),
    "min_compression_rate": ("min_compression_rate", 2.0),
    "use_error_feedback": ("error_feedback", True),
    "warm_start": ("warm_start", True),
}
"""Option of `PowerSGDState` -> the key, and PyTorch's default."""
_UNUSED = (
    "orthogonalization_epsilon",
    "random_seed",
    "compression_stats_logging_frequency",
    "batch_tensors_with_same_shape",
)
"""Options that say how PyTorch computes it."""


def asks_for_hook(handler: object) -> bool:
    """Whether a `DistributedDataParallelKwargs` names a hook."""
    return _name(handler, "comm_hook") != "no"


def with_comm_hook(config: DistConfig, handlers: Iterable[object]) -> DistConfig:
    """`config` with what a hook among `handlers` asks for. Local.

    Raises `ConfigError` if the file says something else, and for an option that PyTorch does not know.
    """
    for handler in handlers:
        if type(handler).__name__ == _TOOL and asks_for_hook(handler):
            config = with_layout(config, ForeignLayout(_TOOL, {}, _keys(handler, config)))
    return config


def _keys(handler: object, config: DistConfig) -> dict[str, tuple[object, str]]:
    """JSON path -> value, and who asks for it."""
    hook, wrapper = _name(handler, "comm_hook"), _name(handler, "comm_wrapper")
    said = f"comm_hook={hook}"
    if hook in _DTYPES and wrapper not in ("no", hook):
        fix = "Keep one of the two."
        raise ConfigError(Problem("kwargs_handlers", f"{_TOOL}({said}, comm_wrapper={wrapper})", "are two dtypes", fix))
    keys: dict[str, tuple[object, str]] = {}
    if hook in _DTYPES:
        keys[_TYPE] = (hook, said)
    elif wrapper != "no":
        keys[_TYPE] = (wrapper, f"comm_wrapper={wrapper}")
    return keys if hook in _DTYPES else keys | _factors(getattr(handler, "comm_state_option", None) or {}, said, config)


def _factors(given: Mapping[str, object], said: str, config: DistConfig) -> dict[str, tuple[object, str]]:
    unknown = [name for name in given if name not in _OPTIONS and name not in _UNUSED]
    if unknown:
        known = [*_OPTIONS, *_UNUSED]
        raise ConfigError(
            [
                Problem(
                    "kwargs_handlers",
                    f"{_TOOL}(comm_state_option={{{name!r}: ...}})",
                    "is no option of PowerSGD",
                    did_you_mean(name, known, f"Its options are {', '.join(known)}."),
                )
                for name in unknown
            ]
        )
    for name in _UNUSED:
        if name in given:
            say_once(f"{_TOOL}(comm_state_option={{{name!r}: ...}}) says how PyTorch computes, and has no effect here")
    keys: dict[str, tuple[object, str]] = {
        "zero_optimization.stage": (0, said),
        f"{_WIRES}.gradients": ("powersgd", said),
    }
    for name, (key, default) in _OPTIONS.items():
        path = f"{_WIRES}.powersgd.{key}"
        if name in given:
            keys[path] = (_coerced(name, key, given[name]), f"{name}={given[name]}")
        elif config.source_of(path) != "file":
            keys[path] = (default, f"{name}={default}")
    return keys


def _coerced(name: str, key: str, value: object) -> object:
    try:
        return getattr(PowerSgdConfig.model_validate({key: value}), key)
    except ValidationError as error:
        clause = error.errors()[0]["msg"].removeprefix("Value error, ")
        found = f"{_TOOL}(comm_state_option={{{name!r}: {value!r}}})"
        raise ConfigError(Problem("kwargs_handlers", found, clause, "Change it, or remove it.")) from None


def _name(handler: object, field: str) -> str:
    """Of a member of accelerate's enumeration, or as a string: "bf16"."""
    value = getattr(handler, field, "no")
    return str(getattr(value, "value", value)).lower()
