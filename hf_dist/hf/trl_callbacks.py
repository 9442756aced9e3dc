"""TRL's callbacks that read or write weights, on shards: synchronised reference models, moving averages, teacher adapters.

Source: trl 1.16, `trainer/callbacks.py`, `experimental/bema_for_ref_model/callback.py`, `experimental/sdft/teacher_sync.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_dist.sharding.full_params import gathered
from hf_dist.sharding.prepared import OWNER

__all__ = ["let_callbacks_work"]


def let_callbacks_work(callbacks: Iterable[object], accelerator: object) -> None:
    """Make TRL's known callbacks work on shards. Every rank calls it, before the model is prepared."""
    for callback in callbacks:
        for kind in type(callback).__mro__:
            change = _CHANGES.get(kind.__name__) if kind.__module__.startswith("trl.") else None
            if change is not None:
                change(callback, accelerator)
                break


def _follow(callback: Any, accelerator: object) -> None:
    callback.sync_target_model = move_towards


def move_towards(model: nn.Module, reference: nn.Module, alpha: float) -> None:
    """`reference = (1 - alpha) * reference + alpha * model`, group by group. Both are sharded. Every rank calls it."""
    _move(zip(reference.parameters(), model.parameters(), strict=True), alpha)


@torch.no_grad()
def _move(pairs: Iterable[tuple[nn.Parameter, nn.Parameter]], alpha: float) -> None:
    """Update (target, source) pairs; the targets of a group are written together. Collective."""
    parts: dict[int, list[tuple[nn.Parameter, nn.Parameter]]] = {}
    for target, source in pairs:
        parts.setdefault(id(getattr(target, OWNER)[0]()), []).append((target, source))
    for part in parts.values():
        with gathered([source for _, source in part]), gathered([target for target, _ in part], modifier_rank=0):
            for target, source in part:
                target.mul_(1.0 - alpha).add_(source.to(target.dtype), alpha=alpha)


def _average(callback: Any, accelerator: object) -> None:
    """BEMA copies all weights and reads the model's weights, so the weights are gathered where it reads them."""

    def on_train_begin(
        args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: object, **kwargs: object
    ) -> object:
        with _whole(accelerator, model):
            return type(callback).on_train_begin(callback, args, state, control, model=model, **kwargs)

    def on_step_end(
        args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: object, **kwargs: object
    ) -> object:
        looks, writes = _due(callback, state.global_step)
        reference = kwargs.get("ref_model") if writes else None
        writer = 0 if writes and reference is None else None  # TRL then writes into the model itself
        with (
            _whole(accelerator, model, writer) if looks or writes else nullcontext(),
            _whole(accelerator, reference, 0),
        ):
            return type(callback).on_step_end(callback, args, state, control, model=model, **kwargs)

    callback.on_train_begin, callback.on_step_end = on_train_begin, on_step_end


def _due(callback: object, step: int) -> tuple[bool, bool]:
    """(whether it reads the model after this step, whether it writes the reference model)."""

    def at(after: str, every: str) -> bool:
        passed = step - getattr(callback, after)
        return passed >= 0 and passed % getattr(callback, every) == 0

    writes = getattr(callback, "update_ref_model", False)
    return at("update_after", "update_freq"), writes and at("ref_model_update_after", "ref_model_update_freq")


def _whole(accelerator: Any, model: Any, writer: int | None = None) -> AbstractContextManager[None]:
    prepared = model is not None and accelerator.engine_of(model) is not None
    return gathered(model, modifier_rank=writer) if prepared else nullcontext()


def _adapter(callback: Any, accelerator: Any) -> None:
    """Add the teacher's adapter before the model is sharded, and let it follow the student's on shards."""
    model = accelerator.unwrap_model(callback.model)
    if accelerator.engine_of(model) is not None:
        return  # too late: PEFT's `add_adapter` raises with the reason
    callback._initialize_teacher_adapter()
    student, teacher = f".{model.active_adapter}.", f".{callback.teacher_adapter_name}."
    params = dict(model.named_parameters())
    pairs = [(params[name.replace(student, teacher)], source) for name, source in params.items() if student in name]

    def on_step_end(args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if state.global_step % callback.sync_steps == 0:
            _move(pairs, callback.update_rate)

    callback.on_step_end = on_step_end


_CHANGES: dict[str, Callable[[object, object], None]] = {
    "SyncRefModelCallback": _follow,
    "BEMACallback": _average,
    "PEFTAdapterEMACallback": _adapter,
}
