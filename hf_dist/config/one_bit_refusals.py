"""What cannot be together with a 1-bit optimizer: rows of `refusals.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_dist.config.arguments import ONE_BIT_OPTIMIZERS, OPTIMIZER_ARGUMENTS
from hf_dist.config.refusal import Refusal
from hf_dist.config.schema import DistConfig

__all__ = ["ONE_BIT_REFUSALS", "sends_momentum"]

_ZERO = "zero_optimization"
_WHOLE = "momentum is exchanged among ranks that hold the same whole weights"
_IN_FP32 = "momentum that ranks send is fp32"


@dataclass(frozen=True)
class _Row:
    """A setting that 1-bit optimizers rule out."""

    path: str
    """The key that is refused."""
    asked: Callable[[DistConfig], bool]
    why: str
    fix: str
    """What to do with the key, a clause."""
    two: dict[str, Any]
    """The setting alone, as in a file; for tests."""


def sends_momentum(config: DistConfig) -> bool:
    """Whether the config's optimizer is one of them."""
    return config.optimizer is not None and config.optimizer.type in ONE_BIT_OPTIMIZERS


_ROWS = (
    _Row(
        f"{_ZERO}.stage",
        lambda config: config.zero_optimization.stage > 1,
        "stages 2 and 3 shard reduced gradients, which a 1-bit optimizer has only before the freeze",
        "Set it to 1 or 0",
        {_ZERO: {"stage": 2}},
    ),
    _Row(
        "pipeline.stages",
        lambda config: config.pipeline.stages > 1,
        _WHOLE,
        "Set it to 1",
        {"pipeline": {"stages": 2}},
    ),
    _Row(
        "tensor_parallel.autotp_size",
        lambda config: config.tensor_parallel.autotp_size > 1,
        _WHOLE,
        "Set it to 1",
        {"tensor_parallel": {"autotp_size": 2}},
    ),
    _Row(
        "expert_parallel.enabled",
        lambda config: config.expert_parallel.enabled,
        _WHOLE,
        "Set it to false",
        {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    ),
    _Row(
        "hf_dist.optimizer_over",
        lambda config: config.hf_dist.optimizer_over == "all",
        _WHOLE,
        "Remove the key",
        {_ZERO: {"stage": 1, "mics_shard_size": 2}, "hf_dist": {"optimizer_over": "all"}},
    ),
    _Row(
        "local_sgd.every",
        lambda config: config.local_sgd.every > 0,
        "replicas that train alone send nothing in a step",
        "Remove the section",
        {"local_sgd": {"every": 2}},
    ),
    _Row(
        "hf_dist.optimizer_in_backward",
        lambda config: config.hf_dist.optimizer_in_backward,
        "momentum is sent in the step",
        "Set it to false",
        {"hf_dist": {"optimizer_in_backward": True}},
    ),
    _Row(
        f"{_ZERO}.offload_optimizer.device",
        lambda config: config.zero_optimization.offload_optimizer.device != "none",
        "momentum is sent from the device in every step",
        'Set it to "none"',
        {_ZERO: {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    ),
    _Row(
        "elasticity.enabled",
        lambda config: config.elasticity.enabled,
        "what a message left out belongs to a rank, and another number of ranks loses it",
        "Remove the section",
        {"elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2]}},
    ),
    _Row(
        "bf16.bf16_optimizer_states",
        lambda config: config.bf16.bf16_optimizer_states,
        _IN_FP32,
        "Set it to false",
        {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
    ),
    _Row(
        "bf16.bf16_master_weights_and_grads",
        lambda config: config.bf16.bf16_master_weights_and_grads,
        _IN_FP32,
        "Set it to false",
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    ),
    _Row(
        "data_types.grad_accum_dtype",
        lambda config: config.data_types.grad_accum_dtype not in (None, "fp32"),
        _IN_FP32,
        'Set it to "fp32"',
        {"data_types": {"grad_accum_dtype": "bf16"}},
    ),
)


def _left_over(config: DistConfig) -> str:
    """What AdamW would refuse next: one round shows all that is wrong."""
    assert config.optimizer is not None, "a 1-bit optimizer is a setting of it"
    names = sorted(OPTIMIZER_ARGUMENTS[config.optimizer.type] - OPTIMIZER_ARGUMENTS["AdamW"])
    return f"AdamW does not take {', '.join(names)}: remove them then."


def _refusal(row: _Row) -> Refusal:
    return Refusal(
        row.path,
        "a 1-bit optimizer",
        lambda config: sends_momentum(config) and row.asked(config),
        row.why,
        f'is not available together with "optimizer.type" "{{other}}": {row.why}',
        f'{row.fix}, or set "optimizer.type" to "AdamW".',
        row.two,
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 10, "cuda_aware": False}}},
        "optimizer.type",
        _left_over,
    )


ONE_BIT_REFUSALS = tuple(map(_refusal, _ROWS))
"""A row for each of them."""
