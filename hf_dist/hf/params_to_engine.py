"""The gradients that a list of parameters refers to: of one engine, several engines, part of a model, or plain tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_dist.engine.engine import Engine
from hf_dist.engine.window import Window
from hf_dist.errors import ModelError


@dataclass(frozen=True)
class Listed:
    """The gradients of some parameters."""

    windows: list[tuple[Window, set[int] | None]]
    """Each with the ids of its listed parameters, or None for all trainable ones. Empty only before a model is prepared."""
    plain: list[torch.Tensor]
    """Gradients of tensors that no engine holds."""


def listed_gradients(engines: Sequence[Engine], parameters: Any) -> Listed:
    """The gradients of `parameters`: one tensor, or an iterable of parameters or of tensors from an optimizer's param groups.

    Local. Raises `ModelError` for a subset of the parameters under a pipeline: one stage cannot see the others' subsets.
    """
    tensors: Iterable[Any] = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    listed = {id(p): p for p in tensors}
    windows: list[tuple[Window, set[int] | None]] = []
    for engine in engines:
        own = {id(p) for g in engine.sharded.trainable_groups for p in g.params}
        of_model = own | {id(p) for p in engine.model.parameters()}
        stands = engine.fragments.stands if engine.fragments is not None else {}
        stood_for = {id(stand): key for key, stand in stands.items()}
        known = [i for i in listed if i in of_model or i in stood_for]
        found = {stood_for.get(i, i) for i in known} & own  # not frozen, and of this rank's stages
        by_stand_in = any(i in stood_for for i in known)
        for i in known:
            del listed[i]
        if not known:
            continue
        is_all = found == own
        # Only groups list what other stages hold.
        if not is_all and not by_stand_in and engine.mesh.pp.size > 1:
            raise ModelError(
                f"clipping got {len(found)} of {len(own)} trainable parameters: with pipeline.stages above 1 pass "
                "model.parameters(), because the stages clip together"
            )
        windows.append((engine.window, None if is_all else found))
    plain = [p.grad for p in listed.values() if p.grad is not None]
    return Listed(windows or [(engine.window, set()) for engine in engines[:1]], plain)
