"""The exchange of momentum in the codec `signs`, in place of the reduction of gradients; see `compressed.py`.

    backward      each rank keeps its own gradient of the window (`FlatGroup.keeps_own`); nothing is sent
    norm, clip    of the ranks' own gradients, as one mean square: the same factor on all ranks
    step          b1 m + (1 - b1) g of each rank -> signs, with error feedback on both sides -> the new m, equal on all ranks;
                  the optimizer reads it where it would read the gradient

A step that is skipped has sent nothing, so momentum and what earlier messages left out stay as they were. Alternative
considered: the exchange in backward, beside the computation. There the loss scale, the clip's factor and a skipped step are not
known yet, and DeepSpeed sends in the step, too. At stage 1 every rank keeps all of the momentum, to add its gradient to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hf_dist.dist import collectives
from hf_dist.dist.collectives import Handle
from hf_dist.errors import ModelError
from hf_dist.optim.compressed import Compressed, Message
from hf_dist.optim.fragment import Fragment, Used
from hf_dist.optim.stand_in import StandIn
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.messages import mean
from hf_dist.sharding.reducer import MAX_REDUCTIONS_IN_FLIGHT
from hf_dist.sharding.runtime import ShardedModel

__all__ = ["SentMomentum"]


@dataclass(frozen=True)
class _Place:
    """A parameter of a group; see `OfParameter`."""

    group: FlatGroup
    index: int


class SentMomentum:
    """The messages of one optimizer."""

    def __init__(
        self,
        sharded: ShardedModel,
        optimizer: Compressed,
        fragments: Mapping[tuple[int, int], Fragment],
        stands: Mapping[int, StandIn],
    ) -> None:
        """`fragments`: this rank's, by (id of the group, index); `stands`: see `FragmentedOptimizer.stands`. Local.

        Raises `ModelError` if the model was not prepared for these messages."""
        self._sharded, self._optimizer = sharded, optimizer
        self._fragments, self._stands = fragments, stands
        self._whole: dict[
            int, torch.Tensor
        ] = {}  # id of a group -> its momentum, of groups that the optimizer has a shard of
        if any(g.axes.shard.size > 1 and "momentum" not in g.messages for g in sharded.trainable_groups):
            kind = type(optimizer).__name__
            raise ModelError(
                f'{kind} sends momentum, and the model was not prepared for it: name it in the config, "optimizer": '
                f'{{"type": "{kind}", "params": {{...}}}}, and let the engine make it'
            )
        if further := {row.axis.name for g in sharded.trainable_groups for row in g.axes.then}:
            raise ModelError(
                f"{type(optimizer).__name__} exchanges momentum among the ranks of a shard, and gradients are combined over "
                f"{', '.join(sorted(further))} as well: use AdamW, or ranks that all hold the same weights"
            )
        optimizer.joined = self._join if any(self._is_cut(g) for g in sharded.trainable_groups) else None

    @staticmethod
    def _is_cut(group: FlatGroup) -> bool:
        return group.resting != (0, group.layout.numel)

    @property
    def is_next(self) -> bool:
        """Whether the next step sends a message in place of the gradient. Equal on all ranks."""
        return self._optimizer.message() is not None

    def forget(self) -> None:
        """States of the optimizer have changed. Local."""
        self._whole.clear()

    @torch.no_grad()
    def exchange(self, used: Used) -> None:
        """Turn each group's own gradient into what has arrived, in `group.grad`. Collective over the shard axes."""
        message = self._optimizer.message()
        groups = [g for g in self._sharded.trainable_groups if g.gradient_now[0] is not None]
        flying: deque[tuple[FlatGroup, torch.Tensor, Handle]] = deque()
        if self._optimizer.begins():  # what signs of gradients left out is no part of a momentum
            for group in groups:
                if "momentum" in group.messages:
                    group.messages["momentum"].residuals.clear()
        for group in groups:
            values = group.take_own()
            if message is Message.MOMENTUM:
                self._mix(group, values, used)
            handle = mean(group.axes.shard, values, group.messages.get("momentum"), group.rest.storage.link)
            flying.append((group, values, handle))
            if len(flying) > MAX_REDUCTIONS_IN_FLIGHT:
                self._arrived(*flying.popleft(), used)
        while flying:
            self._arrived(*flying.popleft(), used)
        self._optimizer.arrived = message is Message.MOMENTUM

    def _mix(self, group: FlatGroup, values: torch.Tensor, used: Used) -> None:
        """Turn this rank's gradient into its momentum. A parameter that no rank has used keeps its momentum. Local, or at
        stage 1, first after a start, collective."""
        options = {id(p): options for options in self._optimizer.param_groups for p in options["params"]}
        before = self._before(group)
        for index, slot in enumerate(group.layout.slots):
            part, stand = values[slot.offset : slot.stop], self._stands.get(id(group.params[index]))
            momentum = before.get(index)
            own = options.get(id(stand))
            if own is None or not used(_Place(group, index)):
                part.zero_()
                if momentum is not None and own is not None:
                    part.copy_(momentum)
                continue
            beta = own["betas"][0]
            part.mul_(1.0 - beta)
            if momentum is not None:
                part.add_(momentum, alpha=beta)

    def _before(self, group: FlatGroup) -> dict[int, torch.Tensor]:
        """Momentum so far, by index of the parameter, 1-D and whole; parameters without any are left out."""
        if not self._is_cut(group):
            found = {i: self._state(group, i).get("exp_avg") for i in range(len(group.params))}
            return {i: values for i, values in found.items() if values is not None}
        if id(group) not in self._whole:
            self._whole[id(group)] = self._gathered(group)
        whole = self._whole[id(group)]
        return {i: whole[slot.offset : slot.stop] for i, slot in enumerate(group.layout.slots)}

    def _state(self, group: FlatGroup, index: int) -> Mapping[str, Any]:
        fragment = self._fragments.get((id(group), index))
        return {} if fragment is None else self._optimizer.state.get(fragment.tensor, {})

    def _gathered(self, group: FlatGroup) -> torch.Tensor:
        """The momentum of all shards. Collective over the shard axis, once after a start or a load."""
        whole = torch.zeros(group.layout.numel, dtype=torch.float32, device=group.mesh.device)
        for index in range(len(group.params)):
            fragment, momentum = self._fragments.get((id(group), index)), self._state(group, index).get("exp_avg")
            if fragment is not None and momentum is not None:
                first = group.resting[0] + fragment.start
                whole[first : first + momentum.numel()] = momentum
        collectives.all_gather(group.axes.shard, whole).wait()
        return whole

    def _arrived(self, group: FlatGroup, values: torch.Tensor, handle: Handle, used: Used) -> None:
        handle.wait()
        if self._is_cut(group) and self._optimizer.message() is Message.MOMENTUM:
            before = self._whole[id(group)]
            for index, slot in enumerate(group.layout.slots):
                if not used(_Place(group, index)):
                    values[slot.offset : slot.stop] = before[slot.offset : slot.stop]
            self._whole[id(group)] = values
        group.gradient.replace(values[slice(*group.resting)])

    def _join(self, tensor: torch.Tensor, operation: Literal["sum", "max"]) -> None:
        collectives.all_reduce(self._sharded.mesh.shard, tensor.view(-1), operation).wait()
