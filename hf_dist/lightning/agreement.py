"""Which part of a LightningModule is sharded, and agreement between its Trainer's arguments and the JSON."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_dist.config import DistConfig
from hf_dist.errors import ConfigError, ModelError, Problem

__all__ = ["agreed", "part_to_shard"]

_STEPS, _CLIPPING = "gradient_accumulation_steps", "gradient_clipping"


def part_to_shard(module: Any) -> nn.Module:
    """The child of a LightningModule that holds all trainable parameters, or the module itself.

    Lightning calls steps instead of the module's forward. A child called by a step needs nothing more, and saves as an HF
    model. Raises `ModelError` for a child that cannot be called.
    """
    trained = {id(p) for p in module.parameters() if p.requires_grad} or {id(p) for p in module.parameters()}
    holders = {
        name: child for name, child in module.named_children() if any(id(p) in trained for p in child.parameters())
    }
    direct = [name for name, p in module.named_parameters(recurse=False) if id(p) in trained]
    if len(holders) != 1 or direct:
        return module
    ((name, child),) = holders.items()
    if isinstance(child, nn.ModuleList | nn.ModuleDict):
        raise ModelError(
            f"{type(module).__name__}.{name} is a {type(child).__name__}, which has no forward around which weights could be "
            "gathered. Put its modules into one nn.Module (class Net(nn.Module): ...) and call that in training_step."
        )
    return child


def agreed(config: DistConfig, trainer: Any) -> DistConfig:
    """`config` with the values of the Trainer's arguments. Raises `ConfigError` if they differ."""
    changes: dict[str, tuple[object, str]] = {}
    problems = []
    asked = {_STEPS: trainer.accumulate_grad_batches, _CLIPPING: trainer.gradient_clip_val}
    for path, name in ((_STEPS, "accumulate_grad_batches"), (_CLIPPING, "gradient_clip_val")):
        written, given = config.value_at(path), asked[path]
        if not isinstance(written, int | float):
            # Lightning would clip by itself, but the strategy asks the engine to clip.
            changes[path] = (given if path == _STEPS else 0.0, f"auto <- Trainer({name})")
        elif given not in (None, written):
            fix = f'Set it to "auto", or remove {name}.'
            reason = f"differs from Trainer({name}={given})"
            problems.append(Problem(config.spelled(path), str(written), reason, fix, config.at_line(path)))
    if problems:
        raise ConfigError(problems)
    return config.replaced(changes)
