"""The text of a new config from a few choices: each key under a comment that says what it does."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hf_dist.config.meaning import meaning
from hf_dist.errors import ConfigError, Problem

__all__ = ["Choices", "new_file"]

_WIDTH = 100
_HEAD = """\
// A config of hf_dist in DeepSpeed's keys. Comments may stay. Every key: `hf-dist config explain FILE --all`
// "auto": from the arguments of the Trainer.
"""


@dataclass(frozen=True)
class Choices:
    """What decides most about a layout."""

    stage: Literal[0, 1, 2, 3] = 3
    """ZeRO stage."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    offload: Literal["none", "optimizer", "all"] = "none"
    """What lies in the host's memory: nothing, the optimizer state, or also the weights (stage 3)."""
    tensor: int = 1
    """Ranks that share each layer."""
    sequence: int = 1
    """Ranks that share each sequence."""
    pipeline: int = 1
    """Pipeline stages."""

    @property
    def together(self) -> int:
        """Ranks that compute one batch; the number of ranks is a multiple of it."""
        return self.tensor * self.sequence * self.pipeline


def new_file(choices: Choices, schema: str) -> str:
    """A commented JSON text with these choices; `schema` is the value of "$schema".

    Raises `ConfigError` if weights are to be offloaded below stage 3; `load_config` finds what else does not go together.
    """
    if choices.offload == "all" and choices.stage < 3:
        fix = 'Choose stage 3, or "optimizer".'
        raise ConfigError(Problem("offload", '"all"', f"moves weights, which stage {choices.stage} keeps whole", fix))
    return _HEAD + "\n".join(_lines({"$schema": schema, **_data(choices)}, "", 0)) + "\n"


def _data(choices: Choices) -> dict[str, Any]:
    host = {"device": "cpu", "pin_memory": True}
    moved = {"none": (), "optimizer": ("offload_optimizer",), "all": ("offload_optimizer", "offload_param")}
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        **({"sequence_parallel_size": choices.sequence} if choices.sequence > 1 else {}),
        **({"tensor_parallel": {"autotp_size": choices.tensor}} if choices.tensor > 1 else {}),
        **({"pipeline": {"stages": choices.pipeline}} if choices.pipeline > 1 else {}),
        "zero_optimization": {"stage": choices.stage, **{section: dict(host) for section in moved[choices.offload]}},
        "fp16" if choices.precision == "fp16" else "bf16": {"enabled": choices.precision != "fp32"},
    }


def _lines(node: Mapping[str, Any], path: str, depth: int) -> Iterator[str]:
    """The lines of an object; a comment above each key that has a value."""
    yield "{"
    space = "  " * (depth + 1)
    for number, (key, value) in enumerate(node.items(), start=1):
        where = f"{path}.{key}" if path else key
        comma = "," if number < len(node) else ""
        if isinstance(value, dict):
            first, *inside = _lines(value, where, depth + 1)
            yield f"{space}{json.dumps(key)}: {first}"
            yield from inside[:-1]
            yield inside[-1] + comma
            continue
        prefix = f"{space}// "
        yield from textwrap.wrap(meaning(where), _WIDTH, initial_indent=prefix, subsequent_indent=prefix)
        yield f"{space}{json.dumps(key)}: {json.dumps(value)}{comma}"
    yield "  " * depth + "}"
