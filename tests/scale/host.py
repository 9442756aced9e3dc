"""CPU time of a step on tensors so small that only the host's work counts, engine beside engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hf_dist.dist import collectives
from hf_dist.sharding import units
from tests.scale.engines import LLAMA_3, Case, config_of, make_fsdp2, make_ours, make_plain
from tests.scale.world import fake_world, forget_launcher

_COLLECTIVES = [(dist, name) for name in ("all_gather_single", "reduce_scatter_single", "all_reduce")]
_COLLECTIVES += [(collectives, name) for name in ("_all_gather", "_reduce_scatter")]
HOST_WORLD = 64


class Collectives:
    """CPU time inside of collectives: the fake group copies there, rank by rank, which no real one lets the host do."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Inside, it is measured."""
        originals = [(module, name, getattr(module, name)) for module, name in _COLLECTIVES if hasattr(module, name)]
        for module, name, function in originals:
            setattr(module, name, self._wrapped(function))
        try:
            yield
        finally:
            for module, name, function in originals:
                setattr(module, name, function)

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start, self._depth = time.thread_time(), self._depth + 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - start

        return call


def make_all(case: Case, stage: int, size: int) -> dict[str, Callable[[dict[str, torch.Tensor]], None]]:
    """A step of torch alone, of this engine and of FSDP2 on the modules of `case`; a fake world must be there."""
    small = case.shrunk()
    units.OWN_UNIT_EMBEDDING_NUMEL = 1  # so that the small embedding is the unit that the large one would be
    torch.manual_seed(0)
    return {
        "torch": make_plain(small.llama())[1],
        "hf_dist": make_ours(small.llama(), config_of(stage))[1],
        "fsdp2": make_fsdp2(small.llama(), init_device_mesh("cpu", (size,)), ends=True)[1],
    }


def host_seconds(case: Case, stage: int, size: int, rounds: int = 20) -> dict[str, list[float]]:
    """CPU seconds of each step by engine, without what collectives take; the first two rounds are not counted."""
    found: dict[str, list[float]] = {}
    with fake_world(size):
        steps = make_all(case, stage, size)
        batch = case.shrunk().batch()
        inside = Collectives()
        with inside.timed():
            for number in range(rounds + 2):
                for name, step in steps.items():
                    before = inside.seconds
                    start = time.thread_time()
                    step(batch)
                    seconds = time.thread_time() - start - (inside.seconds - before)
                    if number >= 2:
                        found.setdefault(name, []).append(seconds)
    return found


def host_case(rank: int, world: int, model: str, stage: int, rounds: int) -> dict[str, list[float]]:
    """`host_seconds` in a process of its own."""
    forget_launcher()
    return host_seconds(LLAMA_3[model], stage, HOST_WORLD, rounds)


def summary(found: dict[str, list[float]]) -> dict[str, float]:
    """Medians in milliseconds, and the median of the ratios of neighbouring steps."""
    medians = {f"{name} ms": 1e3 * statistics.median(values) for name, values in found.items()}
    ratios = [ours / theirs for ours, theirs in zip(found["hf_dist"], found["fsdp2"], strict=True)]
    return {**medians, "hf_dist / fsdp2": statistics.median(ratios)}
