"""Bytes that a rank sends, by the formula of each collective: hf_dist's own counter, or every collective torch dispatches.

Both count the bytes needed, not those of a backend: gloo's own reduce-scatter sends twice as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dist.dist import comm_counter

__all__ = ["DispatchCounter", "OwnCounter"]


class OwnCounter:
    """For hf_dist, whose collectives all pass through one file that counts."""

    def __enter__(self) -> None:
        self._recording = comm_counter.record()
        self._log = self._recording.__enter__()

    def __exit__(self, *args: object) -> None:
        self._recording.__exit__(None, None, None)

    def nbytes(self) -> int | None:
        """Bytes sent by this rank."""
        return self._log.nbytes()


class DispatchCounter(TorchDispatchMode):
    """For all other engines: collectives are torch operators, including those that C++ starts in backward."""

    def __init__(self) -> None:
        super().__init__()
        self._sent = 0
        self._calls = 0
        self._unknown: set[str] = set()

    def nbytes(self) -> int | None:
        """Bytes sent by this rank; None if several ranks sent nothing visible, or something without a formula."""
        blind = not self._calls and dist.is_initialized() and dist.get_world_size() > 1
        return None if blind or self._unknown else self._sent

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        """Run the operator; count it if it is a collective."""
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # their inner operators are dispatched again
        namespace, name = func.namespace, func._schema.name.split("::")[1]
        if namespace == "c10d" or namespace.startswith("_c10d_functional"):
            self._add(name.strip("_"), args, functional=namespace != "c10d")
        return func(*args, **(kwargs or {}))

    def _add(self, name: str, args: Sequence[object], functional: bool) -> None:
        """`functional`: the operator takes its input and returns a result; others take output, then input."""
        if name in _SENDS_NOTHING:
            return
        self._calls += 1
        kind = next((kind for prefix, kind in _KINDS.items() if name.startswith(prefix)), None)
        group = _named_group(args[-1]) if functional else _group_of(args)
        size = group.size() if group is not None else 0
        if kind is None or not size:
            self._unknown.add(name)
        elif kind == "all_reduce":
            self._sent += 2 * (size - 1) * _nbytes(args[0]) // size
        elif kind == "all_gather":
            self._sent += (size - 1) * _nbytes(args[0] if functional else args[1])
        elif kind == "reduce_scatter":
            self._sent += (size - 1) * (_nbytes(args[0]) // size if functional else _nbytes(args[0]))
        elif kind == "all_to_all":
            self._sent += (size - 1) * _nbytes(args[0] if functional else args[1]) // size
        elif kind == "broadcast":
            root = args[1] if functional else args[2]
            self._sent += _nbytes(args[0]) if group.rank() == root else 0
        elif kind == "send":
            self._sent += _nbytes(args[0])


_SENDS_NOTHING = {"recv", "recv_any_source", "barrier", "monitored_barrier", "wait_tensor", "wrap_tensor_autograd"}
_KINDS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
}
"""Prefix of operator names -> formula. Nested lists of tensors count as the sum of their parts."""


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_nbytes(each) for each in value)


def _group_of(args: Sequence[object]) -> Any:
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    return None


def _named_group(name: object) -> Any:
    resolve: Any = dist.distributed_c10d._resolve_process_group
    return resolve(name) if isinstance(name, str) else None
