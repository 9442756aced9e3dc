"""The settings of `accelerate launch` (its environment variables and its YAML) as values for hf_dist's keys.

Source: accelerate utils/launch.py (which variables it sets), utils/dataclasses.py (DeepSpeedPlugin: what they mean).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_dist.errors import ConfigError, Problem

_ZERO = "zero_optimization"

DEEPSPEED_KEYS: Mapping[str, str] = {
    "zero_stage": f"{_ZERO}.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": f"{_ZERO}.offload_optimizer.device",
    "offload_param_device": f"{_ZERO}.offload_param.device",
    "offload_optimizer_nvme_path": f"{_ZERO}.offload_optimizer.nvme_path",
    "offload_param_nvme_path": f"{_ZERO}.offload_param.nvme_path",
    "zero3_save_16bit_model": f"{_ZERO}.stage3_gather_16bit_weights_on_model_save",
    "deepspeed_moe_layer_cls_names": f"{_ZERO}.leaf_module.classes",
}
"""Keys of `deepspeed_config` in accelerate's YAML, and options of `accelerate launch`."""

_MARKERS = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_CONFIG_DS_FIELDS")
"""The first variable turns DeepSpeed on in accelerate. `hf_dist` turns it off again; the second still shows the request."""
_CONFIG_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
_VARIABLES: Mapping[str, str] = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "offload_optimizer_nvme_path",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "offload_param_nvme_path",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "zero3_save_16bit_model",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "deepspeed_moe_layer_cls_names",
}


@dataclass(frozen=True)
class LauncherSetting:
    """One value that the launcher set."""

    value: Any
    """The value, as a JSON file would hold it."""
    origin: str
    """The environment variable that carries it, or the key of the YAML."""
    key: str
    """accelerate's own name of the setting, as in the YAML."""


@dataclass(frozen=True)
class LauncherSettings:
    """The launcher's settings by JSON path, and perhaps a DeepSpeed config file."""

    settings: Mapping[str, LauncherSetting]
    config_file: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> LauncherSettings | None:
        """The settings of `accelerate launch --use_deepspeed`; None if DeepSpeed was not requested."""
        if environment.get(_MARKERS[0], "").lower() not in ("1", "true", "yes") and _MARKERS[1] not in environment:
            return None
        given = {name: environment[name] for name in _VARIABLES if environment.get(name, "none").lower() != "none"}
        settings = {
            DEEPSPEED_KEYS[_VARIABLES[name]]: LauncherSetting(_plain(_VARIABLES[name], text), name, _VARIABLES[name])
            for name, text in given.items()
        }
        config_file = environment.get(_CONFIG_FILE, "none")
        return cls(settings, None if config_file == "none" else config_file)

    def base_config(self) -> dict[str, Any]:
        """The config that accelerate starts from if no file is named, before these settings: ZeRO 2, or the given stage."""
        return {} if f"{_ZERO}.stage" in self.settings else {_ZERO: {"stage": 2}}


def launched_precision(asked: object, environment: Mapping[str, str]) -> str:
    """The precision that a script (`asked`, if it is not None) or `accelerate launch` wants: "no", "fp16", "bf16" or "fp8".

    Raises `ConfigError` for products in eight bits by another library than torchao."""
    wanted = str(asked or environment.get("ACCELERATE_MIXED_PRECISION", "no")).lower()
    backend = environment.get(_FP8_BACKEND, "")
    if wanted == "fp8" and backend.upper() in FP8_BACKENDS:
        raise ConfigError(fp8_backend_problem(_FP8_BACKEND, backend))
    return wanted


FP8_BACKENDS = {"TE": "Transformer Engine", "MSAMP": "MS-AMP"}
"""accelerate's names of libraries that replace modules or optimizers -> their own."""
_FP8_BACKEND = "ACCELERATE_FP8_BACKEND"


def fp8_backend_problem(path: str, backend: str) -> Problem:
    """What is wrong with one of `FP8_BACKENDS`, named at `path`."""
    expected = f"is {FP8_BACKENDS[backend.upper()]}, which puts modules of its own in the place of the model's"
    return Problem(
        path, backend, expected, 'Use torchao: backend AO, or "hf_dist": {"fp8": {"enabled": true}} in the JSON.'
    )


def put(config: dict[str, Any], path: str, value: object) -> None:
    """Write `value` at a JSON path, creating missing sections. Does nothing if a section is not an object."""
    *sections, key = path.split(".")
    node: object = config
    for section in sections:
        node = node.setdefault(section, {}) if isinstance(node, dict) else node
    if isinstance(node, dict):
        node[key] = value


def _plain(key: str, text: str) -> Any:
    """The text of a variable as a JSON value."""
    if key == "deepspeed_moe_layer_cls_names":
        return [name.strip() for name in text.split(",")]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
