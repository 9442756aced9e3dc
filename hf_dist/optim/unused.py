"""Finds trainable parameters that got no gradient, and describes them by module."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hf_dist.dist import collectives
from hf_dist.errors import ModelError
from hf_dist.log import say
from hf_dist.sharding.runtime import ShardedModel

__all__ = ["UnusedParameters", "describe_unused", "unused_parameters"]

_MAX_NAMES = 8


class UnusedParameters:
    """Tells once, at the first step that is not skipped, which parameters got no gradient; raises if that is not allowed."""

    def __init__(self, sharded: ShardedModel, *, allowed: bool) -> None:
        self._sharded, self._allowed, self._told = sharded, allowed, False

    def look(self, used: Mapping[tuple[int, int], bool]) -> None:
        """`used`: of a step (see `unused_parameters`). The first call is collective over pp. Raises `ModelError`."""
        if not self._told:
            self._told = True
            text = describe_unused(self._sharded, unused_parameters(self._sharded, used))
            if text:
                say(text)
        if used and not self._allowed:
            names = list(unused_parameters(self._sharded, used))
            if names:
                raise ModelError(
                    f"zero_optimization.ignore_unused_parameters is false, and {len(names)} trainable parameters had no "
                    f"gradient on any rank in this step, the first is {names[0]}. Freeze them, use them in the loss, or remove "
                    "the key."
                )


def unused_parameters(sharded: ShardedModel, used: Mapping[tuple[int, int], bool]) -> dict[str, int]:
    """Name -> number of elements of this rank's parameters that had no gradient on any data rank. Local.

    `used`: from a `GradientSummary`."""
    return {
        slot.name: slot.numel
        for group in sharded.trainable_groups
        for i, slot in enumerate(group.layout.slots)
        if not used.get((id(group), i), True)
    }


def describe_unused(sharded: ShardedModel, unused: Mapping[str, int]) -> str:
    """A sentence for the log of the first step; empty if all had a gradient. Collective over pp: each stage has its own."""
    trained = {slot.name for group in sharded.trainable_groups for slot in group.layout.slots}
    everyone = collectives.all_gather_object(sharded.mesh.pp, (dict(unused), trained))
    missing = {name: numel for theirs, _ in everyone for name, numel in theirs.items()}
    if not missing:
        return ""
    whole = _by_module(missing, set().union(*(names for _, names in everyone)))
    listed = [f"{name}.* ({count})" if count > 1 else name for name, count in list(whole.items())[:_MAX_NAMES]]
    more = f" and {len(whole) - _MAX_NAMES} more modules" if len(whole) > _MAX_NAMES else ""
    return (
        f"{len(missing)} trainable parameters ({sum(missing.values()):,} elements) got no gradient in the first step: "
        f"{', '.join(listed)}{more}. If the data never reaches them, freeze them before the model is prepared: that saves "
        "their gradients and optimizer state. Experts and towers are trained as soon as data reaches them."
    )


def _by_module(missing: Mapping[str, int], trained: Collection[str]) -> dict[str, int]:
    """Highest module without any gradient -> number of its parameters; a single parameter is listed by its own name."""
    found: dict[str, int] = {}
    reached: set[str] = set()
    for name in trained:
        if name not in missing:
            parts = name.split(".")
            reached.update(".".join(parts[:n]) for n in range(1, len(parts)))
    for name in missing:
        parts = name.split(".")
        prefixes = [".".join(parts[:n]) for n in range(1, len(parts))]
        top = next((prefix for prefix in prefixes if prefix not in reached), name)
        found[top] = found.get(top, 0) + 1
    return {next(n for n in missing if n.startswith(top)) if count == 1 else top: count for top, count in found.items()}
