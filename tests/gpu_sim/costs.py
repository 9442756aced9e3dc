"""How long an operator, a copy or a collective takes on the GPU of the timed model. Only ratios mean something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from hf_dist.parallel.pipeline.meta import grouped_flops

FLOPS = 450e12
"""Of matrix products in half precision, per second."""
FLOAT8, FLOAT8_ROWS = 800e12, 550e12
"""Of those in float8, with a scale per tensor and per row."""
MEMORY = 2.6e12
"""Bytes that kernels read and write, per second."""
HOST_LINK = 25e9
"""Bytes between host and device, per second."""
LAUNCH = 2e-6
"""The shortest kernel."""
LATENCY = 20e-6
"""Of a collective without bytes."""
NETWORK = 300e9
"""Bytes that one rank sends and receives, per second; a case may set another."""


def operator_seconds(func: Any, args: Any, kwargs: Any, out: Any, tensors: Sequence[torch.Tensor]) -> float:
    """Of a kernel: by its products, else by the bytes of its tensors; of a copy to or from the host by those it sends."""
    devices = {t.device.type for t in tensors}
    if "cuda" not in devices:
        return 0.0
    if devices == {"cuda", "cpu"} and "copy" in func._schema.name:
        return LAUNCH + min(nbytes_of(t) for t in tensors) / HOST_LINK
    if func._overloadpacket is torch.ops.aten._grouped_mm:  # experts; torch's counter does not know it
        return max(grouped_flops(*args[:2]) / FLOPS, LAUNCH)
    count = flop_registry.get(func._overloadpacket)
    if count is not None:
        try:
            return max(float(count(*args, **kwargs, out_val=out)) / _rate(func, args), LAUNCH)
        except (TypeError, ValueError, AssertionError, IndexError):
            pass  # an overload that torch does not count
    return LAUNCH + sum(map(nbytes_of, tensors)) / MEMORY


def _rate(func: Any, args: Any) -> float:
    """Of a product, per second; that of float8 gets the scales of its factors behind them."""
    if func._overloadpacket is not torch.ops.aten._scaled_mm:
        return FLOPS
    return FLOAT8_ROWS if any(scales.numel() > 1 for scales in args[2:4]) else FLOAT8


def nbytes_of(tensor: torch.Tensor) -> int:
    """Of its elements."""
    return tensor.numel() * tensor.element_size()


def transfer_seconds(kind: str, nbytes: int, ranks: int, network: float | None = None) -> float:
    """Of a collective over a tensor of `nbytes`, by the bytes that the best algorithm sends; of a send by all of them."""
    if ranks < 2:
        return 0.0
    parts = {"all_reduce": 2 * (ranks - 1) / ranks, "send": 1.0, "receive": 1.0, "broadcast": 1.0}
    return LATENCY + nbytes * parts.get(kind, (ranks - 1) / ranks) / (network or NETWORK)
