"""A link carries headers and tensors of every dtype, counts their bytes, and names an end that is gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_dist.dist.link import _DTYPES, Link
from hf_dist.dist.wires import GroupWire, SocketWire, Wire
from hf_dist.errors import RemoteError

KINDS = ("group", "socket")
"""What carries a link inside a start, and between two jobs."""


def ends(kind: str, timeout: float = 30) -> tuple[Link, Link]:
    """Both, in one process."""
    waits = timedelta(seconds=timeout)
    found: dict[int, Wire] = {}
    if kind == "socket":
        found = {side: SocketWire(one, waits) for side, one in enumerate(connected())}
    else:
        store = dist.HashStore()

        def make(side: int) -> None:
            found[side] = GroupWire(store, "it", side, waits)

        together(lambda: make(0), lambda: make(1))
    return Link(found[0], "the end 1"), Link(found[1], "the end 0")


def connected() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        one = socket.create_connection(door.getsockname())
        return one, door.accept()[0]


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


@pytest.mark.parametrize("kind", KINDS)
def test_everything_arrives_as_it_was_and_is_counted(kind: str) -> None:
    a, b = ends(kind)
    tensors = [torch.arange(6).view(2, 3).to(dtype) for dtype in _DTYPES.values()]
    tensors += [torch.tensor(2.5), torch.empty(0, 4), torch.arange(6.0).view(2, 3).t()]
    header = {"call": "forward", "options": {"use_cache": False, "x": 1.5, "s": "\u00fc"}}
    _, (found, received) = together(lambda: a.send(header, tensors), b.receive)
    assert found == header
    for one, other in zip(tensors, received, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and one.equal(other)
    assert a.sent_nbytes == b.received_nbytes == sum(t.nbytes for t in tensors) and not a.received_nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_that_is_late_is_named(kind: str) -> None:
    a, b = ends(kind, timeout=0.5)
    with pytest.raises(RemoteError, match="the end 1 did not answer in time"):
        a.receive()
    assert a.is_broken and not b.is_broken


def test_an_end_that_is_gone_is_named() -> None:
    a, b = ends("socket")
    b.close()
    with pytest.raises(RemoteError, match="the end 1 has ended") as told:
        a.receive()
    assert told.value.ended == "the end 1" and a.is_broken


STRANGE = {
    "a length": [torch.tensor([-5])],
    "a pickle": [torch.tensor([23]), torch.frombuffer(bytearray(b"cos\nsystem\n(S'true'\ntR."), dtype=torch.uint8)],
    "no object": [torch.tensor([1]), torch.frombuffer(bytearray(b"3"), dtype=torch.uint8)],
    "a dtype": [torch.tensor([22]), torch.frombuffer(bytearray(b'{"tensors": [["x",1]]}'), dtype=torch.uint8)],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", STRANGE)
def test_what_is_no_header_is_refused_and_nothing_is_unpickled(case: str, kind: str) -> None:
    a, b = ends(kind)

    def send() -> None:
        a.wire.send(STRANGE[case])

    def receive() -> str:
        with pytest.raises(RemoteError) as told:
            b.receive()
        return str(told.value)

    _, words = together(send, receive)
    assert words.startswith("the end 0 sent ") and "hf_dist" in words
