"""What split modules do before and after their own forward: crossings of inputs and outputs, a bias once, rows of a table.

Each function installs hooks on one module. `off()` tells that parameters are whole for a while, so that nothing crosses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_dist.parallel.tensor import tp_collectives
from hf_dist.parallel.tensor.peers import Peers
from hf_dist.parallel.tensor.slices import Kept

__all__ = ["after", "before", "experts", "look_up", "rotary_part", "sum_then_bias"]

Change = Callable[[torch.Tensor], torch.Tensor]
Off = Callable[[], bool]


def before(module: nn.Module, off: Off, change: Change) -> None:
    """Apply `change` to the first argument of `module`."""

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[object, ...] | None:
        return None if off() or not args else (change(args[0]), *args[1:])

    module.register_forward_pre_hook(hook)


def after(module: nn.Module, off: Off, change: Change) -> None:
    """Apply `change` to the output of `module`, before all other hooks, which expect the value the model continues with."""

    def hook(_: nn.Module, args: object, output: Any) -> object:
        return None if off() else change(output)

    module.register_forward_hook(hook, prepend=True)


def sum_then_bias(module: nn.Module, peers: Peers, off: Off, *, add: bool = True) -> None:
    """P -> I, then the bias once, after the sum. Without `add` the output stays P, and the bias counts as zeros.

    The bias still gets a gradient of zeros; otherwise the host would have to ask in each step whether another rank had one.
    """
    biases: list[Any] = []

    def hide(row: nn.Module, args: object) -> None:
        base: Any = getattr(row, "base_layer", row)
        bias = None if off() else base._parameters.get("bias")
        biases.append(bias)
        if bias is not None and not add:
            base._parameters["bias"] = tp_collectives.zeros_of(bias)
        elif bias is not None:
            # GPT-2's Conv1D always adds its bias.
            base._parameters["bias"] = torch.zeros_like(bias) if type(base).__name__ == "Conv1D" else None

    def show(row: nn.Module, args: object, output: object) -> object:
        base: Any = getattr(row, "base_layer", row)
        bias = biases.pop() if biases else None
        if bias is not None:
            base._parameters["bias"] = bias
        if off() or output is None or not add:
            return None
        summed = tp_collectives.to_invariant(output, peers)
        return summed if bias is None else summed + bias

    module.register_forward_pre_hook(hide)
    module.register_forward_hook(show, prepend=True, always_call=True)


def look_up(module: nn.Module, peers: Peers, off: Off, kept: Kept) -> None:
    """Rows of other ranks count as zero, so the sum contains every row once. An id of nobody's row raises as in one process."""
    ((first, last),) = kept.held.ranges[0]
    rows = kept.held.whole[0]
    elsewhere: list[torch.Tensor] = []

    def mask(_: nn.Module, args: tuple[Any, ...]) -> tuple[object, ...] | None:
        if off() or not args:
            return None
        outside = (args[0] < first) | (args[0] >= last)
        elsewhere[:] = [outside]
        of_another = outside & (args[0] >= 0) & (args[0] < rows)
        return torch.where(of_another, 0, args[0] - first), *args[1:]

    def gather(_: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor | None:
        if off() or not elsewhere:
            return None
        own = output.masked_fill(elsewhere.pop().unsqueeze(-1), 0.0)
        return tp_collectives.to_invariant(own, peers)

    module.register_forward_pre_hook(mask)
    module.register_forward_hook(gather, prepend=True)


def rotary_part(module: nn.Module, peers: Peers, off: Off, width: int) -> None:
    """The last `width` columns of a product that each rank computes whole (DeepSeek's rotary keys): I -> R."""

    def both(output: torch.Tensor) -> torch.Tensor:
        compressed, rotary = output.split([output.shape[-1] - width, width], -1)
        return torch.cat([compressed, tp_collectives.to_replicated(rotary, peers)], -1)

    after(module, off, both)


def experts(module: nn.Module, peers: Peers, off: Off, replicated: Change) -> None:
    """Experts that are cut by columns: inputs cross by `replicated`, outputs are summed."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        if off():
            return None
        changed = list(args)
        for position in (0, 2):  # hidden states and expert weights; between them the chosen experts
            if len(changed) > position and isinstance(changed[position], torch.Tensor):
                changed[position] = replicated(changed[position])
        return tuple(changed), kwargs

    module.register_forward_pre_hook(enter, with_kwargs=True)
    after(module, off, lambda out: tp_collectives.to_invariant(out, peers))
