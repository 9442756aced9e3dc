"""Where hf_dist behaves differently from DeepSpeed with the same file, and the key that restores DeepSpeed's behaviour.

Source: DeepSpeed 0.19.6, runtime/engine.py (data types, clipping), runtime/zero/config.py; accelerate 1.15, utils/deepspeed.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hf_dist.config.schema import DistConfig
from hf_dist.config.values import is_auto, shown

_ZERO = "zero_optimization"
_RECOMPUTE = "activation_checkpointing"


@dataclass(frozen=True)
class Difference:
    """One difference between hf_dist and DeepSpeed for the same file."""

    path: str
    """The key that controls it, whether or not the file has it."""
    text: str
    """What hf_dist does and what DeepSpeed does, as a clause."""
    restore: str
    """What to write to get DeepSpeed's behaviour, as a clause."""

    def __str__(self) -> str:
        return f"{self.path}: {self.text}. As there: {self.restore}"


def differences(config: DistConfig) -> tuple[Difference, ...]:
    """The differences of a config as read, or of a resolved one, which also covers the job's own numbers."""
    finders = (_clipping, _wire, _accumulation, _recompute, _overlap, _neox)
    return tuple(found for finder in finders for found in finder(config))


def _clipping(config: DistConfig) -> Iterator[Difference]:
    path = "gradient_clipping"
    source, value = config.source_of(path), config.gradient_clipping
    if not source.startswith(("default", "absent")):
        return
    if source.endswith("<- default"):  # a custom loop
        text = "not in the file, and nothing clips; DeepSpeed since 0.19 may clip at 1.0, its new default"
        yield Difference(path, text, 'write "gradient_clipping": 1.0, or 0.0 to say so')
    elif value != 0:
        norm = "max_grad_norm (1.0 by default)" if value is None else f"max_grad_norm, {shown(value)},"
        text = (
            f"not in the file, so the Trainer's {norm} clips; DeepSpeed under HF reads this key alone and does not clip"
        )
        fix = 'write "gradient_clipping": 0.0 and pass --max_grad_norm 0, or "auto" to say that it clips'
        yield Difference(path, text, fix)


def _half(config: DistConfig) -> str | None:
    """The enabled half precision; "half precision" while "auto" is not filled; None in fp32."""
    switches = {"fp16": config.fp16.enabled, "bf16": config.bf16.enabled}
    on = [name for name, value in switches.items() if value is True]
    open_ones = [name for name, value in switches.items() if is_auto(value)]
    return on[0] if on else "half precision" if open_ones else None


def _wire(config: DistConfig) -> Iterator[Difference]:
    half = _half(config)
    if half is not None and config.communication_data_type is None:
        with_half = f"with {half} " if half == "half precision" else ""
        there = "the half precision" if with_half else half
        text = (
            f"not in the file: {with_half}gradients are sent in fp32 (twice the bytes); DeepSpeed sends them in {there}"
        )
        write = "the half precision" if with_half else f'"{half}"'
        yield Difference("communication_data_type", text, f"write {write}")
    elif half is None and config.torch_autocast.enabled and config.communication_data_type is None:
        text = "not in the file: under autocast gradients are sent in fp32; DeepSpeed sends those of matrices in bf16"
        yield Difference("communication_data_type", text, 'write "bf16"')


def _accumulation(config: DistConfig) -> Iterator[Difference]:
    half = None if config.bf16.bf16_master_weights_and_grads else _half(config)
    if half is not None and config.data_types.grad_accum_dtype is None and config.zero_optimization.stage > 0:
        text = "not in the file: gradients of microbatches are summed in fp32; DeepSpeed sums them in the dtype of the weights"
        write = "the half precision" if half == "half precision" else f'"{half}"'
        yield Difference("data_types.grad_accum_dtype", text, f"write {write}")


def _recompute(config: DistConfig) -> Iterator[Difference]:
    section = config.activation_checkpointing
    given = {
        f"{_RECOMPUTE}.cpu_checkpointing": (section.cpu_checkpointing, "false"),
        "pipeline.activation_checkpoint_interval": (config.pipeline.activation_checkpoint_interval, "0"),
    }
    for path, (value, off) in given.items():
        if value:
            text = (
                "turns checkpointing on; DeepSpeed under HF ignores it unless the script calls checkpointing.configure"
            )
            yield Difference(path, text, f"set it to {off}")


def _overlap(config: DistConfig) -> Iterator[Difference]:
    zero = config.zero_optimization
    absent = config.source_of(f"{_ZERO}.overlap_comm").startswith("default")
    if absent and zero.overlap_comm is not False and zero.stage in (1, 2):
        text = "not in the file: reductions overlap backward on GPUs; in DeepSpeed at stage 3 only"
        yield Difference(f"{_ZERO}.overlap_comm", text, "set it to false")


def _neox(config: DistConfig) -> Iterator[Difference]:
    if config.spelled("fp16.enabled") == "fp16.fp16" and config.fp16.enabled is not False:
        text = "a key of GPT-NeoX, which is read as fp16.enabled; DeepSpeed ignores it and trains in fp32"
        yield Difference("fp16.fp16", text, "remove it")
