"""States that an optimizer was created with (Adagrad's sums): cut for a fragment, kept, and put back when states start anew."""

from __future__ import annotations

import copy

import torch

from hf_dist.optim.fragment import Fragment


def cut_state(key: str, value: object, fragment: Fragment) -> object:
    """The fragment's part of a state tensor that has its parameter's shape; any other value unchanged."""
    slot = fragment.slot
    whole = torch.Size(slot.held.whole)
    # torch's step counter is 0-dimensional, and a parameter can be too: only the name distinguishes them.
    if not isinstance(value, torch.Tensor) or value.shape != whole or key == "step":
        return value
    part = slot.held.take(value.detach()).reshape(-1)[fragment.first : fragment.first + fragment.stop - fragment.start]
    return part.to(fragment.tensor.device, torch.float32, copy=True).view(fragment.shape)


def remembered(value: object) -> object:
    """A copy of a state. A constant tensor (Adagrad's sums) is kept as one expanded element."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = value.detach()
    first = value.reshape(-1)[:1]
    constant = value.dim() == 1 and value.numel() > 1 and bool((value == first).all())
    return first.clone().expand(value.shape) if constant else value.clone()


def recalled(value: object) -> object:
    """A new state from the result of `remembered`."""
    if isinstance(value, torch.Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    return copy.deepcopy(value)
