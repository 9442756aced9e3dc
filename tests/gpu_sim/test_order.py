"""The clocks on traces written by hand: what is found, and what is not reported where something orders it."""

from __future__ import annotations

import pytest

from tests.gpu_sim.order import Fault, faults
from tests.gpu_sim.trace import COMPUTE, HOST, Point, Trace

SIDE = "side"


def write(trace: Trace, stream: str, block: int = 1) -> Point:
    return trace.launch(stream, "write", f"{stream}.py:1", reads=(), writes=(block,))


def read(trace: Trace, stream: str, block: int = 1) -> Point:
    return trace.launch(stream, "read", f"{stream}.py:2", reads=(block,), writes=())


def test_one_stream_is_in_order() -> None:
    trace = Trace()
    write(trace, COMPUTE)
    read(trace, COMPUTE)
    write(trace, COMPUTE)
    trace.free(1, COMPUTE, "free.py:1")
    assert faults(trace) == []


@pytest.mark.parametrize(("first", "second"), [(write, read), (read, write), (write, write)])
def test_two_streams_race_unless_one_waits_for_the_other(first: object, second: object) -> None:
    trace = Trace()
    point = first(trace, SIDE)  # type: ignore[operator]
    second(trace, COMPUTE)  # type: ignore[operator]
    (found,) = faults(trace)
    assert found.kind == "race"
    assert f"in stream {COMPUTE} at {COMPUTE}.py" in found.later and f"in stream {SIDE} at {SIDE}.py" in found.earlier
    ordered = Trace()
    first(ordered, SIDE)  # type: ignore[operator]
    ordered.order(COMPUTE, point)
    second(ordered, COMPUTE)  # type: ignore[operator]
    assert faults(ordered) == []


def test_two_readers_do_not_race() -> None:
    trace = Trace()
    read(trace, SIDE)
    read(trace, COMPUTE)
    assert faults(trace) == []


def test_a_wait_for_an_earlier_point_orders_nothing_that_came_after_it() -> None:
    trace = Trace()
    point = write(trace, SIDE, block=7)
    write(trace, SIDE)
    trace.order(COMPUTE, point)
    read(trace, COMPUTE, block=7)
    assert faults(trace) == []
    read(trace, COMPUTE)
    assert len(faults(trace)) == 1


def test_waits_reach_through_a_third_stream() -> None:
    trace = Trace()
    trace.order("middle", write(trace, SIDE))
    trace.order(COMPUTE, trace.point("middle"))
    read(trace, COMPUTE)
    assert faults(trace) == []


def test_what_the_host_has_waited_for_is_over_for_all_streams() -> None:
    trace = Trace()
    point = write(trace, SIDE)
    read(trace, HOST)
    assert len(faults(trace)) == 1, "the host looks while the copy is under way"
    trace = Trace()
    point = write(trace, SIDE)
    trace.block((point,), "synchronize", "host.py:1")
    read(trace, HOST)
    read(trace, COMPUTE)
    assert faults(trace) == []


def test_the_host_may_not_write_what_a_copy_still_reads() -> None:
    trace = Trace()
    write(trace, HOST)
    read(trace, SIDE)
    assert faults(trace) == []
    write(trace, HOST)
    assert [fault.kind for fault in faults(trace)] == ["race"]


@pytest.mark.parametrize("use", [write, read])
def test_memory_goes_back_only_after_other_streams_are_done_with_it(use: object) -> None:
    for waits in (False, True):
        trace = Trace()
        write(trace, COMPUTE)
        trace.order(SIDE, trace.point(COMPUTE))
        point = use(trace, SIDE)  # type: ignore[operator]
        if waits:
            trace.order(COMPUTE, point)
        trace.free(1, COMPUTE, "free.py:1")
        assert [fault.kind for fault in faults(trace)] == ([] if waits else ["early free"])


def test_a_fault_is_told_once() -> None:
    trace = Trace()
    for _ in range(3):
        write(trace, SIDE)
        read(trace, COMPUTE)
    kinds: list[Fault] = faults(trace)
    assert len(kinds) == 2 == len(set(kinds)), "read after write, write after read"
