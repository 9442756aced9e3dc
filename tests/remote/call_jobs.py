"""Functions that a role runs, and a trainer that calls them."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_dist import DistAccelerator, remote_call
from hf_dist.errors import ConfigError, ModelError, RemoteError

HERE = __name__
alive = 0


class Counter:
    """Something that cannot be sent."""

    def __init__(self, start: Tensor) -> None:
        global alive
        alive += 1
        self.total = start

    def __del__(self) -> None:
        global alive
        alive -= 1


def make(start: Tensor, *, times: int) -> Counter:
    """A counter from `times` x `start` plus the rank in the role."""
    return Counter(start * times + int(os.environ["RANK"]))


def add(counter: Counter, values: dict[str, Any]) -> list[Any]:
    """The counter's new total, and what was said with it."""
    counter.total = counter.total + sum(values["more"])
    return [counter.total, values["word"]]


def living() -> int:
    """Counters on this rank."""
    return alive


def fails() -> None:
    """Raise."""
    raise KeyError("of the function")


def ask(rank: int, world: int, config: dict[str, Any], breaks: bool) -> dict[str, Any] | None:
    """Values that came back; None on the ranks of the role."""
    try:
        accelerator = DistAccelerator(dist_config=config)
    except SystemExit as end:
        assert not end.code, end
        return None
    if config.get("tensor_parallel"):
        from tests.parity.families import make_model

        accelerator.prepare(make_model("llama", layers=2))
    counter = remote_call("scorer", make, torch.tensor([1.0, 2.0]), times=3)
    total = remote_call("scorer", f"{HERE}:add", counter, {"more": [1, 2.5], "word": "so"})
    count = remote_call("scorer", living)
    found: dict[str, Any] = {"total": total.get(), "of rank 1": total.get(rank=1), "alive": count.get()}
    with pytest.raises(ConfigError, match=r"hf_dist.roles.scorer.functions: .* does not allow os:getcwd"):
        remote_call("scorer", "os:getcwd")
    with pytest.raises(ModelError, match="has ranks 0 to 1, and no rank 2"):
        total.get(rank=2)
    with pytest.raises(ModelError, match="cannot be imported"):
        remote_call("scorer", lambda: 1)
    with pytest.raises(ModelError, match="and only tensors"):
        remote_call("scorer", add, object())
    if breaks:
        with pytest.raises(RemoteError, match=r"role scorer, rank \d: KeyError: 'of the function'"):
            remote_call("scorer", fails).wait()
        return found
    del counter, total
    gc.collect()
    found["afterwards"] = remote_call("scorer", living).get()
    count.free()
    count._ends.asker.close()
    return found
