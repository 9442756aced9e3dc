"""Any element-wise torch optimizer on sharded parameters: it steps *fragments*, 1-D views of the fp32 master weights.

One fragment per parameter and rank (none where the rank holds no element of it), so weight decay, learning-rate groups,
freezing and LoRA stay per parameter, and a parameter without a gradient on any rank is skipped exactly as in one process
(no decay, no momentum). Alternative considered: one flat tensor per group, which is one kernel instead of many, but steps
unused parameters too; torch's fused AdamW runs a hundred tensors as fast as one flat tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_dist.errors import ModelError
from hf_dist.sharding.group import FlatGroup
from hf_dist.sharding.runtime import ShardedModel


@dataclass(eq=False)
class Fragment:
    """This rank's elements of one parameter, as the optimizer sees them."""

    name: str
    """Full parameter name."""
    tensor: nn.Parameter  # 1D fp32, view of `group.source`
    group: FlatGroup
    index: int
    """Position of the parameter in `group`."""
    start: int
    """First element in `group.source` and `group.grad`."""
    stop: int


class FragmentedOptimizer:
    """Binds an optimizer to a sharded model: parameters become fragments, gradients are lent for the step."""

    def __init__(self, sharded: ShardedModel, optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters in `optimizer.param_groups` in place; the optimizer object stays the user's own.

        State that the optimizer already has (Adagrad makes its sums at construction) is cut like its parameters.
        Raises `ModelError` when the optimizer has parameters of another model.
        """
        self.sharded = sharded
        self.optimizer = optimizer
        self.fragments = _make_fragments(sharded)
        by_owner = {(id(f.group), f.index): f for f in self.fragments}
        places = {id(p): (id(g), i) for g in sharded.groups for i, p in enumerate(g.params)}
        slot_names = {(id(g), i): slot.name for g in sharded.groups for i, slot in enumerate(g.layout.slots)}
        self.param_names: list[list[str]] = []
        """Full names in each param group, of all ranks' parameters, in the order the optimizer was made with."""
        for group in optimizer.param_groups:
            own: list[nn.Parameter] = []
            names: list[str] = []
            self.param_names.append(names)
            for p in group["params"]:
                if id(p) not in places:
                    elsewhere = sharded.pipeline.name_elsewhere(p) if sharded.pipeline else None
                    if elsewhere is not None:  # another pipeline stage steps it
                        names.append(elsewhere)
                        optimizer.state.pop(p, None)
                        continue
                    raise ModelError(
                        f"the optimizer holds a parameter of shape {tuple(p.shape)} that is not in the model. Create the "
                        "optimizer from the parameters of the model that is prepared with it."
                    )
                names.append(slot_names[places[id(p)]])
                fragment = by_owner.get(places[id(p)])
                state = optimizer.state.pop(p, None)
                if fragment is not None:
                    own.append(fragment.tensor)
                    if state:
                        optimizer.state[fragment.tensor] = {k: _cut(k, v, p, fragment) for k, v in state.items()}
            group["params"] = own
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.fragments = [f for f in self.fragments if id(f.tensor) in stepped]

    def step(self, used: Callable[[Fragment], bool], closure: Any = None) -> Any:
        """Lend every used fragment its gradient, step, take the gradients back. Local."""
        for f in self.fragments:
            grad = f.group.grad
            if grad is not None and used(f):
                f.tensor.grad = grad[f.start : f.stop].to(f.tensor.dtype)
        try:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        finally:
            for f in self.fragments:
                f.tensor.grad = None

    def state_dict(self) -> dict[str, Any]:
        """State of this rank's fragments by parameter name, with the options of each param group."""
        names = {id(f.tensor): f for f in self.fragments}
        state = {names[id(p)].name: dict(s) for p, s in self.optimizer.state.items() if id(p) in names}
        options = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return {"state": state, "param_groups": options}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` of the same rank and layout returned."""
        if len(saved["param_groups"]) != len(self.optimizer.param_groups):
            raise ModelError(
                f"the checkpoint's optimizer has {len(saved['param_groups'])} param groups, this one has "
                f"{len(self.optimizer.param_groups)}; resume with the same optimizer settings"
            )
        for f in self.fragments:
            if f.name in saved["state"]:
                self.optimizer.state[f.tensor] = dict(saved["state"][f.name])
        for group, options in zip(self.optimizer.param_groups, saved["param_groups"], strict=True):
            group.update(options)


def _make_fragments(sharded: ShardedModel) -> list[Fragment]:
    fragments = []
    for group in sharded.trainable_groups:
        for index, slot in enumerate(group.layout.slots):
            start, stop = group.fragment(slot)
            if stop > start:
                tensor = nn.Parameter(group.source[start:stop], requires_grad=True)
                fragments.append(Fragment(slot.name, tensor, group, index, start, stop))
    return fragments


def _cut(key: str, value: Any, param: nn.Parameter, fragment: Fragment) -> Any:
    """The fragment's part of a state tensor that is shaped like its parameter; anything else as it is."""
    # torch's own step counter is 0-dimensional, and so may be a parameter: only the name tells them apart.
    if not isinstance(value, torch.Tensor) or value.shape != param.shape or key == "step":
        return value
    slot = fragment.group.layout.slots[fragment.index]
    first = fragment.group.resting[0] + fragment.start - slot.offset
    part = value.detach().reshape(-1)[first : first + fragment.stop - fragment.start]
    return part.to(fragment.tensor.device, torch.float32, copy=True)
