"""The replay on traces written by hand: times, hangs, and what occupies the device."""

from __future__ import annotations

import pytest

from tests.gpu_sim.replay import Outcome, replay
from tests.gpu_sim.trace import COMPUTE, Point, Trace, Transfer


def compute(trace: Trace, seconds: float, what: str = "product") -> Point:
    return trace.launch(COMPUTE, what, "model.py:1", reads=(), writes=(), seconds=seconds)


def move(trace: Trace, kind: str, name: str = "c", seconds: float = 0.0, ranks: tuple[int, ...] = (0, 1)) -> Point:
    """Issued after what was computed so far."""
    stream = f"nccl {name}"
    trace.order(stream, trace.point(COMPUTE))
    more = {"reads": (), "writes": (), "seconds": seconds, "transfer": Transfer(name, ranks, kind, 8)}
    return trace.launch(stream, kind, "engine/engine.py:1", **more)


def test_streams_run_beside_each_other_and_wait_where_they_are_told() -> None:
    trace = Trace()
    compute(trace, 2.0)
    gather = move(trace, "all_gather", seconds=3.0)
    compute(trace, 1.0)
    trace.order(COMPUTE, gather)
    compute(trace, 1.0)
    outcome = replay([trace])
    assert outcome.seconds == pytest.approx(2 + 3 + 1)
    assert outcome.busy[COMPUTE] == pytest.approx(4)
    assert outcome.ratio == pytest.approx(1.5)
    assert outcome.hung == []


def test_time_is_counted_from_a_mark() -> None:
    trace = Trace()
    compute(trace, 2.0)
    trace.mark("step")
    compute(trace, 1.0)
    outcome = replay([trace], mark="step")
    assert (outcome.seconds, outcome.busy[COMPUTE]) == (pytest.approx(1), pytest.approx(1))


def test_a_launch_after_a_wait_of_the_host_does_not_begin_before_its_end() -> None:
    trace = Trace()
    side = trace.launch("side", "copy", "host.py:1", reads=(), writes=(), seconds=5.0)
    compute(trace, 1.0)
    assert replay([trace]).seconds == pytest.approx(5)
    trace.block((side,), "synchronize", "host.py:2")
    compute(trace, 1.0)
    assert replay([trace]).seconds == pytest.approx(6)


def both(first: Trace, second: Trace, **how: int) -> Outcome:
    first.rank, second.rank = 0, 1
    return replay([first, second], **how)


def test_a_transfer_ends_on_both_ranks_when_the_later_one_has_come() -> None:
    fast, slow = Trace(), Trace()
    got = move(fast, "receive", seconds=1.0)
    compute(slow, 4.0)
    move(slow, "send", seconds=1.0)
    fast.order(COMPUTE, got)
    compute(fast, 1.0)
    outcome = both(fast, slow)
    assert outcome.hung == []
    assert outcome.seconds == pytest.approx(4 + 1 + 1)
    assert outcome.waiting == 1


def test_ranks_that_use_two_communicators_first_in_different_orders_wait_for_ever() -> None:
    one, other = Trace(), Trace()
    move(one, "receive", "b")
    move(one, "send", "f")
    move(other, "receive", "f")
    move(other, "send", "b")
    outcome = both(one, other)
    assert len(outcome.hung) == 2
    assert outcome.hung[0] == "rank 0 waits in the first use of b for rank 1: receive at engine/engine.py:1"


def test_used_once_in_one_order_before_they_do_not() -> None:
    one, other = Trace(), Trace()
    for name in ("b", "f"):
        for trace in (one, other):
            move(trace, "all_reduce", name)
    move(one, "receive", "b")
    move(one, "send", "f")
    move(other, "receive", "f")
    move(other, "send", "b")
    assert both(one, other).hung == []


def test_a_collective_that_one_rank_leaves_out_is_named() -> None:
    one, other = Trace(), Trace()
    for trace in (one, other):
        move(trace, "all_gather")
    one.order(COMPUTE, move(one, "all_gather"))
    compute(one, 1.0)
    assert both(one, other).hung[0].startswith("rank 0: stream")


def test_with_one_hardware_queue_a_send_behind_the_receive_that_needs_it_never_begins() -> None:
    """The receive of the answer is posted, the stream of products waits for it, and then comes the send."""
    for queues, hangs in ((1, True), (8, False)):
        asks, answers = Trace(), Trace()
        for trace in (asks, answers):
            for name in ("there", "back"):
                move(trace, "all_reduce", name)
        compute(asks, 1.0)
        asks.order(COMPUTE, move(asks, "receive", "back"))
        asks.launch(
            "nccl there",
            "send",
            "engine/engine.py:2",
            reads=(),
            writes=(),
            transfer=Transfer("there", (0, 1), "send", 8),
        )
        answers.order(COMPUTE, move(answers, "receive", "there"))
        compute(answers, 1.0)
        move(answers, "send", "back")
        assert bool(both(asks, answers, queues=queues).hung) is hangs
