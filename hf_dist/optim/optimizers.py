"""The optimizers of one engine: usually one; several if they divide the parameters (Muon for matrices, AdamW for the rest)."""

from __future__ import annotations

from typing import Any

import torch

from hf_dist.errors import ModelError
from hf_dist.memory.offload.resting import Tier
from hf_dist.optim.attach import First, FragmentedOptimizer
from hf_dist.optim.fragment import Fragment, Used
from hf_dist.optim.in_backward import StepInBackward
from hf_dist.optim.stand_in import StandIn
from hf_dist.optim.step_scaling import StepScaling, takes_scaling

__all__ = ["Joint", "Optimizers"]


class Joint:
    """Several optimizers as one object: their param groups in order, their states, their calls."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def kind(self) -> str:
        """The classes, for checkpoints and reports."""
        return " + ".join(type(optimizer).__name__ for optimizer in self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all, themselves."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The states of all; a new dict of the states themselves."""
        return {p: state for optimizer in self.optimizers for p, state in optimizer.state.items()}


class Optimizers:
    """What the engine, checkpoints and reports ask of all optimizers together; see `FragmentedOptimizer` for the calls."""

    def __init__(self, members: list[FragmentedOptimizer] | None = None) -> None:
        """Without `members`, the model has no optimizer until `replace`."""
        self.members: list[FragmentedOptimizer] = []
        self.in_backward: StepInBackward | None = None
        """Steps groups before the window's end, with `optimizer_in_backward`."""
        self.has_own_options = True
        """False if the options of param groups were loaded from a checkpoint."""
        if members:
            self.replace(members)

    def replace(self, members: list[FragmentedOptimizer], *, in_backward: bool = False) -> None:
        """From now on step with `members`, and with no earlier ones. `in_backward`: their one member steps in backward. Local.

        Raises `ModelError`, with nothing changed, if two members have the same parameter.
        """
        known: set[str] = set()
        for member in members:
            names = {name for names in member.param_names for name in names}
            if twice := known & names:
                raise ModelError(f"{min(twice)} is in two optimizers of one model: give each parameter to one of them")
            known |= names
        self.members, self.has_own_options = members, True
        self.in_backward = StepInBackward(members[0]) if in_backward else None

    @property
    def defers_clip(self) -> bool:
        """Whether the next step can itself multiply the gradients, so that products are deferred."""
        return len(self.members) == 1 and takes_scaling(self.members[0].optimizer)

    @property
    def optimizer(self) -> Any:
        """The optimizer, or all of them as one object."""
        own = [member.optimizer for member in self.members]
        return own[0] if len(own) == 1 else Joint(own)

    def of(self, optimizer: torch.optim.Optimizer) -> FragmentedOptimizer:
        """What steps `optimizer`. Raises `ModelError` for another engine's, or for one that an optimizer of this one wraps."""
        for member in self.members:
            if member.optimizer is optimizer:
                return member
        own = self.optimizer.kind if isinstance(self.optimizer, Joint) else type(self.optimizer).__name__
        raise ModelError(
            f"{type(optimizer).__name__} is not an optimizer that this engine steps ({own}): call the latter"
        )

    @property
    def fragments(self) -> list[Fragment]:
        """This rank's fragments."""
        return [f for member in self.members for f in member.fragments]

    @property
    def stands(self) -> dict[int, StandIn]:
        """id of a parameter of the model -> its stand-in in the param groups."""
        return {key: stand for member in self.members for key, stand in member.stands.items()}

    @property
    def param_names(self) -> list[list[str]]:
        """Full names of each param group's parameters, on all ranks."""
        return [names for member in self.members for names in member.param_names]

    @property
    def sees_whole(self) -> bool:
        """Whether states belong to whole tensors, at their owners."""
        return any(member.sees_whole for member in self.members)

    @property
    def sends(self) -> bool:
        """Whether the next step sends something else than gradients, which end in it."""
        return any(member.sends for member in self.members)

    @property
    def on_device(self) -> bool:
        """Whether all stepped tensors and states are on the device."""
        return all(member.on_device for member in self.members)

    def step(
        self,
        used: Used,
        scaling: StepScaling | None = None,
        first: First | None = None,
        only: torch.optim.Optimizer | None = None,
    ) -> None:
        """Step all, or `only` one of them."""
        for member in self.members if only is None else [self.of(only)]:
            member.step(used, scaling, first if len(self.members) == 1 else None)

    def take_writes(self) -> bool:
        """Whether user code has written elements of the param groups, which are taken."""
        taken = False
        for member in self.members:  # each takes its own, also after one that has some
            taken |= member.take_writes()
        return taken

    def note_written(self) -> None:
        """Take the elements as they are for those of the last step."""
        for member in self.members:
            member.note_written()

    def start_anew(self) -> None:
        """Forget all states."""
        for member in self.members:
            member.start_anew()

    def resident_nbytes(self) -> dict[Tier, int]:
        """Bytes of all states at rest, by tier."""
        held = [member.resident_nbytes() for member in self.members]
        return {tier: sum(own[tier] for own in held) for tier in Tier}
