"""Compares a resumed run's arguments with those in the checkpoint, and says what each change means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MEANING = {
    "global_batch": "an epoch has another number of steps; the position in the data is kept in samples",
    "max_steps": "the schedule is stretched or cut to the new number of steps",
    "num_train_epochs": "the schedule is stretched or cut to the new number of steps",
    "learning_rate": "the schedule continues at the saved step with the base rate of the checkpoint's param groups",
    "lr_scheduler_type": "another schedule takes over at the saved step",
    "warmup_steps": "the schedule is computed with the new warm-up from the saved step on",
    "weight_decay": "the checkpoint's param groups keep theirs",
    "optim": "another optimizer starts with empty state",
    "seed": "random states come from the checkpoint; the order of the data changes from here on",
    "data_seed": "the order of the data changes from here on: samples of this epoch may repeat or be missed",
    "max_grad_norm": "the new limit holds from here on",
}
_FACTORS = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")
"""Their product is the global batch: a change of one of them matters only if that changes."""
_SHOWN = {"world_size": "world_size (ranks with rows of their own)"}
"""Without ranks that share rows, as those of `pp`, `tp` and `cp` do: a job on four ranks may have one."""


def record(args: Any) -> dict[str, Any]:
    """The arguments that matter for a resume, to store in the manifest. Local."""
    values = {name: getattr(args, name, None) for name in (*_MEANING, *_FACTORS) if name != "global_batch"}
    values["global_batch"] = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    plain = (bool, int, float, str, type(None))
    return {name: value if isinstance(value, plain) else str(value) for name, value in values.items()}


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for every argument whose value changed."""
    before, here = saved.get("global_batch"), now.get("global_batch")
    part = (
        f"no effect: the global batch is still {here}"
        if before == here
        else f"global_batch was {before}, is {here} now"
    )
    lines = []
    for name, meaning in {**_MEANING, **dict.fromkeys(_FACTORS, part)}.items():
        if name in saved and saved[name] != now.get(name):
            lines.append(f"{_SHOWN.get(name, name)}: {saved[name]} in the checkpoint, {now.get(name)} now: {meaning}")
    return lines
