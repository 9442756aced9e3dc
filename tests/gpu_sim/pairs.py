"""NCCL between pairs of ranks, as far as a schedule can notice it; ranks are threads of one process.

A communicator belongs to a group and to one of two ways: lone transfers, or several at once. The first transfer of a rank on
a communicator keeps its host until the other rank has begun one there. After that a transfer only has to be issued.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

PATIENCE = 1.0
"""Seconds after which who waits is taken to wait for ever."""


class Hang(Exception):
    """Nobody comes."""


class Communicator:
    """Two ends and what is on its way between them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ends: set[int] = set()
        self.complete = threading.Event()
        self.data: queue.Queue[torch.Tensor] = queue.Queue()

    def join(self, rank: int) -> None:
        self.ends.add(rank)
        if len(self.ends) == 2:
            self.complete.set()
        if not self.complete.wait(PATIENCE):
            raise Hang(f"rank {rank} waits for the other end of {self.name}")


class Nccl:
    """Takes the place of `torch.distributed` in `pipeline/p2p.py`."""

    def __init__(self) -> None:
        self.here = threading.local()
        self.lock = threading.Lock()
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
        with self.lock:
            found = self.communicators.setdefault((group, way), Communicator(f"{group}, {way}"))
        found.join(self.get_rank())
        if op == self.isend:
            found.data.put(tensor.clone())
            return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)
        return SimpleNamespace(wait=lambda: self._arrive(found, tensor), is_completed=lambda: True)

    def _arrive(self, communicator: Communicator, into: torch.Tensor) -> None:
        try:
            into.copy_(communicator.data.get(timeout=PATIENCE))
        except queue.Empty:
            raise Hang(f"rank {self.get_rank()} waits for data of {communicator.name}") from None

    def on_ranks(self, count: int, job: Callable[[int], Any]) -> list[Any]:
        """What `job(rank)` returned on each thread, or its `Hang`."""
        found: dict[int, Any] = defaultdict(lambda: "no answer")

        def run(rank: int) -> None:
            self.here.rank = rank
            try:
                found[rank] = job(rank)
            except BaseException as error:
                found[rank] = error

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20 * PATIENCE)
        return [found[rank] for rank in range(count)]
