"""A link carries headers and tensors of every dtype, counts their bytes, and names an end that is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_dist.dist.link import _DTYPES, Link
from hf_dist.errors import RemoteError


def ends(name: str, timeout: float = 30) -> tuple[Link, Link]:
    """Both, in one process."""
    store = dist.HashStore()
    found: dict[int, Link] = {}

    def make(side: int) -> None:
        found[side] = Link(store, name, side, f"the end {1 - side}", timedelta(seconds=timeout))

    together(lambda: make(0), lambda: make(1))
    return found[0], found[1]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that wait for each other."""
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        results[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_everything_arrives_as_it_was_and_is_counted() -> None:
    a, b = ends("all")
    tensors = [torch.arange(6).view(2, 3).to(dtype) for dtype in _DTYPES.values()]
    tensors += [torch.tensor(2.5), torch.empty(0, 4), torch.arange(6.0).view(2, 3).t()]
    header = {"call": "forward", "options": {"use_cache": False, "x": 1.5, "s": "\u00fc"}}
    _, (found, received) = together(lambda: a.send(header, tensors), b.receive)
    assert found == header
    for one, other in zip(tensors, received, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and one.equal(other)
    assert a.sent_nbytes == b.received_nbytes == sum(t.nbytes for t in tensors) and not a.received_nbytes


def test_an_end_that_is_late_is_named() -> None:
    a, b = ends("late", timeout=0.5)
    with pytest.raises(RemoteError, match="the end 1 did not answer in time"):
        a.receive()
    assert a.is_broken and not b.is_broken


STRANGE = {
    "a length": [torch.tensor([-5])],
    "a pickle": [torch.tensor([24]), torch.frombuffer(bytearray(b"cos\nsystem\n(S'true'\ntR."), dtype=torch.uint8)],
    "no object": [torch.tensor([1]), torch.frombuffer(bytearray(b"3"), dtype=torch.uint8)],
    "a dtype": [torch.tensor([22]), torch.frombuffer(bytearray(b'{"tensors": [["x",1]]}'), dtype=torch.uint8)],
}


@pytest.mark.parametrize("case", STRANGE)
def test_what_is_no_header_is_refused_and_nothing_is_unpickled(case: str) -> None:
    a, b = ends(case)

    def send() -> None:
        for part in STRANGE[case]:
            a._group.send([part], 1, 0).wait()

    def receive() -> str:
        with pytest.raises(RemoteError) as told:
            b.receive()
        return str(told.value)

    _, words = together(send, receive)
    assert words.startswith("the end 0 sent ") and "hf_dist" in words
