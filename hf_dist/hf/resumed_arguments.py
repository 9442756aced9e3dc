"""Compares a resumed run's arguments with those in the checkpoint, and says what each change means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_dist.config.sources import splits_batches

_LATER = ", after one step by the old one"
"""torch's schedules restore the rate of the next step, and compute those after it."""
_MEANING = {
    "global_batch": "an epoch has another number of steps; the position in the data is kept in samples",
    "max_steps": f"the schedule is stretched or cut to the new number of steps{_LATER}",
    "num_train_epochs": f"the schedule is stretched or cut to the new number of steps{_LATER}",
    "learning_rate": "the schedule continues at the saved step with this base rate",
    "lr_scheduler_type": f"another schedule takes over{_LATER}",
    "warmup_steps": f"the schedule is computed with the new warm-up{_LATER}",
    "weight_decay": "the new one holds from here on, as all options of this run's optimizer",
    "optim": "another optimizer starts with empty state",
    "seed": "random states come from the checkpoint; the order of the data changes from here on",
    "data_seed": "the order of the data changes from here on: samples of this epoch may repeat or be missed",
    "max_grad_norm": "the new limit holds from here on",
}
_TAKEN = {
    "learning_rate": "the schedule continues at the saved step with the base rate of the checkpoint's param groups",
    "weight_decay": "the checkpoint's param groups keep theirs",
    "optim": "an optimizer of the same class: the checkpoint's state and the options of its param groups are taken",
}
"""What they mean where the optimizer is of the same class."""
_FACTORS = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")
"""Their product is the global batch: a change of one of them matters only if that changes."""
_SHOWN = {"world_size": "world_size (ranks with rows of their own)"}
"""Without ranks that share rows, as those of `pp`, `tp` and `cp` do: a job on four ranks may have one."""


def rows_per_batch(args: Any) -> int:
    """Samples of a microbatch over all ranks. With `split_batches` the argument is that number already."""
    rows: int = args.per_device_train_batch_size * (1 if splits_batches(args) else args.world_size)
    return rows


def record(args: Any) -> dict[str, object]:
    """The arguments that matter for a resume, to store in the manifest. Local."""
    values = {name: getattr(args, name, None) for name in (*_MEANING, *_FACTORS) if name != "global_batch"}
    values["global_batch"] = rows_per_batch(args) * args.gradient_accumulation_steps
    plain = (bool, int, float, str, type(None))
    return {name: value if isinstance(value, plain) else str(value) for name, value in values.items()}


def changes(saved: Mapping[str, Any], now: Mapping[str, Any], *, same_optimizer: bool = True) -> list[str]:
    """One line for every argument whose value changed. `same_optimizer`: the options of the checkpoint's param groups were
    taken, because its optimizer is of this run's class."""
    before, here = saved.get("global_batch"), now.get("global_batch")
    part = (
        f"no effect: the global batch is still {here}"
        if before == here
        else f"global_batch was {before}, is {here} now"
    )
    meanings = {**_MEANING, **dict.fromkeys(_FACTORS, part), **(_TAKEN if same_optimizer else {})}
    if now.get("data_seed") is not None and saved.get("data_seed") == now["data_seed"]:
        meanings["seed"] = "no effect: random states come from the checkpoint, and data_seed orders the data"
    if saved.get("max_steps", -1) > 0 and now.get("max_steps", -1) > 0:  # which are what counts then
        del meanings["num_train_epochs"]
    lines = []
    for name, meaning in meanings.items():
        if name in saved and saved[name] != now.get(name):
            lines.append(f"{_SHOWN.get(name, name)}: {saved[name]} in the checkpoint, {now.get(name)} now: {meaning}")
    return lines
