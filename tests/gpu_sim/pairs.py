"""NCCL between pairs of ranks, as far as a schedule can notice it; ranks are threads of one process.

A communicator belongs to a group and to one of two ways: lone transfers, or several at once. The first transfer of a rank on
a communicator keeps its host until the other rank has begun one there. After that a transfer only has to be issued.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch


class Hang(Exception):
    """Nobody comes."""


class Communicator:
    """Two ends and what is on its way between them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ends: set[int] = set()
        self.data: deque[torch.Tensor] = deque()


class Waits:
    """Who waits for what; nobody comes any more when all ranks that have not ended wait for something that is not there."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.running = 0
        self._waited: list[Callable[[], bool]] = []

    def until(self, there: Callable[[], bool], what: str) -> None:
        """Raises `Hang`."""
        with self.changed:
            self._waited.append(there)
            self.changed.notify_all()
            self.changed.wait_for(lambda: there() or self._is_stuck())
            self._waited.remove(there)
            if not there():
                raise Hang(what)

    def _is_stuck(self) -> bool:
        return len(self._waited) == self.running and not any(there() for there in self._waited)

    @contextmanager
    def change(self) -> Iterator[None]:
        """Around what others may wait for."""
        with self.changed:
            yield
            self.changed.notify_all()


class Nccl:
    """Takes the place of `torch.distributed` in `parallel/pipeline/p2p.py`."""

    def __init__(self) -> None:
        self.here = threading.local()
        self.waits = Waits()
        self.communicators: dict[tuple[Any, str], Communicator] = {}

    def get_backend(self, group: Any) -> str:
        return "nccl"

    def get_rank(self) -> int:
        return int(self.here.rank)

    def isend(self, tensor: torch.Tensor, dst: int, group: Any) -> Any:
        return self._transfer(tensor, group, "lone", self.isend)

    def irecv(self, tensor: torch.Tensor, src: int, group: Any) -> Any:
        return self._transfer(tensor, group, "lone", self.irecv)

    def P2POp(self, op: Any, tensor: torch.Tensor, peer: int, group: Any) -> Any:
        return tensor, group, op

    def batch_isend_irecv(self, ops: list[Any]) -> list[Any]:
        return [self._transfer(tensor, group, "several", op) for tensor, group, op in ops]

    def _transfer(self, tensor: torch.Tensor, group: Any, way: str, op: Any) -> Any:
        rank = self.get_rank()
        with self.waits.change():
            found = self.communicators.setdefault((group, way), Communicator(f"{group}, {way}"))
            found.ends.add(rank)
        self.waits.until(lambda: len(found.ends) == 2, f"rank {rank} waits for the other end of {found.name}")
        if op == self.isend:
            with self.waits.change():
                found.data.append(tensor.clone())
            return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)
        return SimpleNamespace(wait=lambda: self._arrive(found, tensor), is_completed=lambda: True)

    def _arrive(self, communicator: Communicator, into: torch.Tensor) -> None:
        what = f"rank {self.get_rank()} waits for data of {communicator.name}"
        self.waits.until(lambda: bool(communicator.data), what)
        into.copy_(communicator.data.popleft())

    def on_ranks(self, count: int, job: Callable[[int], Any]) -> list[Any]:
        """What `job(rank)` returned on each thread, or its `Hang`."""
        found: dict[int, Any] = defaultdict(lambda: "no answer")

        def run(rank: int) -> None:
            self.here.rank = rank
            try:
                found[rank] = job(rank)
            except BaseException as error:
                found[rank] = error
            finally:
                with self.waits.change():
                    self.waits.running -= 1

        self.waits.running = count
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[rank] for rank in range(count)]
