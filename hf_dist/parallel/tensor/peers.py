"""The ranks over which one model's weights are split, as the crossings use them.

`MeshPeers` are processes along the mesh axis `tp`. `ThreadPeers` are threads of one process, used to verify a plan on
a tiny copy of the model before a job uses it. A backward on the CPU runs in the calling thread, so threads may exchange
data inside a backward.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from hf_dist.dist import collectives
from hf_dist.dist.mesh import MeshAxis

_SECONDS = 60.0


class Started(NamedTuple):
    """A running sum."""

    tensor: torch.Tensor
    """The tensor that will hold the result."""
    wait: Callable[[], None]


class Peers(Protocol):
    """The ranks of one split. No method changes its argument. All peers call each method with tensors of one shape."""

    @property
    def size(self) -> int:
        """Number of peers."""

    @property
    def rank(self) -> int:
        """This peer's rank."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of all peers' tensors, on each peer."""

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """The element-wise maximum, on each peer."""

    def parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every peer's tensor, by rank."""

    def scatter_sum(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of the sum, one of `size` equal parts along `dim`."""

    def start_sum(self, tensor: torch.Tensor) -> Started:
        """Like `sum`, but it overlaps computation until it is waited for."""

    def start_scatter_sum(self, tensor: torch.Tensor, dim: int) -> Started:
        """Like `scatter_sum`, but it overlaps computation until it is waited for."""


class AtOnce(ABC):
    """Peers whose sums are complete as soon as they start."""

    @abstractmethod
    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Peers.sum`."""

    @abstractmethod
    def scatter_sum(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """As `Peers.scatter_sum`."""

    def start_sum(self, tensor: torch.Tensor) -> Started:
        """As `Peers.start_sum`."""
        return Started(self.sum(tensor), lambda: None)

    def start_scatter_sum(self, tensor: torch.Tensor, dim: int) -> Started:
        """As `Peers.start_scatter_sum`."""
        return Started(self.scatter_sum(tensor, dim), lambda: None)


class MeshPeers:
    """Peers that are processes."""

    def __init__(self, axis: MeshAxis) -> None:
        self.axis = axis
        self.size, self.rank = axis.size, axis.rank

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Peers.sum`. Collective."""
        return _awaited(self.start_sum(tensor))

    def start_sum(self, tensor: torch.Tensor) -> Started:
        """As `Peers.start_sum`. Collective."""
        return self._reduced(tensor, "sum")

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Peers.max`. Collective."""
        return _awaited(self._reduced(tensor, "max"))

    def _reduced(self, tensor: torch.Tensor, op: str) -> Started:
        out = tensor.detach().clone(memory_format=torch.contiguous_format)
        # Not a view, because models write into their layers' outputs.
        return Started(out, collectives.all_reduce(self.axis, out.view(-1), op=op).wait)

    def parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """As `Peers.parts`. Collective."""
        numel = tensor.numel()
        full = torch.empty(self.size * numel, dtype=tensor.dtype, device=tensor.device)
        full[self.rank * numel : (self.rank + 1) * numel] = tensor.detach().reshape(-1)
        collectives.all_gather(self.axis, full).wait()
        return [part.view(tensor.shape) for part in full.split(numel)] if numel else [tensor] * self.size

    def scatter_sum(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """As `Peers.scatter_sum`. Collective."""
        return _awaited(self.start_scatter_sum(tensor, dim))

    def start_scatter_sum(self, tensor: torch.Tensor, dim: int) -> Started:
        """As `Peers.start_scatter_sum`. Collective."""
        pieces = tensor.detach().chunk(self.size, dim)
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        out = torch.empty(pieces[0].shape, dtype=tensor.dtype, device=tensor.device)
        handle = collectives.reduce_scatter(self.axis, flat, out.view(-1), op="sum")
        read = [flat]  # keeps the input alive until the wait

        def wait() -> None:
            handle.wait()
            read.clear()

        return Started(out, wait)


def _awaited(started: Started) -> torch.Tensor:
    started.wait()
    return started.tensor


class ThreadPeers(AtOnce):
    """Peers that are threads of this process."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self.size, self.rank = meeting.size, rank

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Peers.sum`, in the order of the ranks."""
        total, *rest = self._everyone(tensor)
        total = total.clone()
        for other in rest:
            total.add_(other)
        return total

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Peers.max`."""
        return torch.stack(self._everyone(tensor)).amax(0)

    def parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """As `Peers.parts`."""
        return [other.clone() for other in self._everyone(tensor)]

    def scatter_sum(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """As `Peers.scatter_sum`."""
        return self.sum(tensor).chunk(self.size, dim)[self.rank].contiguous()

    def _everyone(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        meeting = self._meeting
        meeting.tensors[self.rank] = tensor.detach().clone()  # others read it while this rank's code goes on
        meeting.barrier.wait(_SECONDS)
        everyone = list(meeting.tensors)
        meeting.barrier.wait(_SECONDS)
        if any(other.shape != everyone[0].shape for other in everyone):
            raise RuntimeError(f"the ranks differ: {[tuple(other.shape) for other in everyone]}")
        return everyone


class _Meeting:
    def __init__(self, size: int) -> None:
        self.size = size
        self.tensors: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)


def run_threads(size: int, function: Callable[[ThreadPeers], Any]) -> list[Any]:
    """The results of `function(peers)` on `size` threads. Raises the error of the first thread that fails."""
    # In a forked process the first users of torch's thread pool replace it; two at once fail ("Invalid thread pool!").
    torch.set_num_threads(torch.get_num_threads())
    meeting, results = _Meeting(size), [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadPeers(meeting, rank))
        except threading.BrokenBarrierError:
            pass  # another thread has failed and reported why
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
