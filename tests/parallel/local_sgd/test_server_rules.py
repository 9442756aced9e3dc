"""What a server does with the calls of its replicas, in one process: whose weights begin, what counts, what follows."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_dist.config.training_sections import LocalSgdConfig
from hf_dist.dist.mesh import MeshAxis
from hf_dist.errors import RemoteError
from hf_dist.parallel.local_sgd.cells import cells_for, rows_of
from hf_dist.parallel.local_sgd.delayed_nesterov import DelayedNesterov
from hf_dist.parallel.local_sgd.server import ReplicaServer
from hf_dist.tensors.tensor_slice import TensorSlice

CONFIG = LocalSgdConfig(mode="server", every=10, outer_lr=0.5, outer_momentum=0.9, nesterov=True)


class _Link:
    """The server's end of a link to a replica of one rank, which a test talks through."""

    def __init__(self) -> None:
        self.calls: queue.Queue[Any] = queue.Queue()
        self.answers: queue.Queue[Any] = queue.Queue()

    def receive(self) -> Any:
        """Of the server."""
        message = self.calls.get()
        if message is None:
            raise RemoteError("it has ended")
        return message

    def send(self, header: Any, tensors: Any = ()) -> None:
        """Of the server."""
        self.answers.put((dict(header), [t.clone() for t in tensors]))

    def close(self) -> None:
        """Of the server: whoever waits learns it."""
        self.answers.put(({"closed": True}, []))

    def ask(self, call: str, *tensors: torch.Tensor, **header: Any) -> Any:
        """Of the replica."""
        self.calls.put(({"call": call, **header}, list(tensors)))
        return self.answers.get(timeout=30)


class _Server:
    def __init__(self, server: ReplicaServer) -> None:
        self.server = server
        self._count = 0

    def come(self, number: int) -> _Link:
        """A replica with that number."""
        link, self._count = _Link(), self._count + 1
        self.server.guests.expect(number, 1, f"session {self._count}", lambda rank: link)  # type: ignore[arg-type, return-value]
        return link


@contextmanager
def running(replicas: int, config: LocalSgdConfig = CONFIG) -> Iterator[_Server]:
    """A server of one rank, which ends when all replicas have left."""
    server = ReplicaServer(MeshAxis("world", 1, 0, None), config, replicas)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    made = _Server(server)
    yield made
    for number in range(replicas):
        if number not in server.guests.by_number:
            made.come(number).calls.put(None)
    for guest in list(server.guests.by_number.values()):
        guest.lose("the test is over")
    thread.join(30)
    assert not thread.is_alive()


def joined(
    link: _Link, values: float, version: int = 0, shape: tuple[int, ...] = (3,)
) -> tuple[bool, Any, torch.Tensor]:
    """Whether it brought the weights, the header of the answer, and the weights."""
    cells, shapes = [["w", list(shape), [0] * len(shape), list(shape)]], [["w", list(shape)]]
    header, tensors = link.ask("join", version=version, shapes=shapes, cells=cells)
    founds = header.get("founds", False)
    if founds:
        header, tensors = link.ask("found", torch.full(shape, values).view(-1), version=version, count=0, round=1)
    return founds, header, tensors[0] if tensors else torch.empty(0)


def push(link: _Link, moved: float, lineage: int, steps: int = 10, seconds: float = 1.0) -> Any:
    """The answer's header and the weights."""
    header, (weights,) = link.ask("push", torch.full((3,), moved), lineage=lineage, steps=steps, seconds=seconds)
    return header, weights


def test_the_first_brings_the_weights_and_the_others_take_them() -> None:
    with running(2) as server:
        first, second = server.come(0), server.come(1)
        founds, header, _ = joined(first, 2.0)
        assert founds
        push(first, 0.2, header["lineage"])
        founds, _, weights = joined(second, 7.0)
        assert not founds
        torch.testing.assert_close(weights, torch.full((3,), 2.0 - 0.5 * (1.9 * 0.2)))


def test_a_later_checkpoint_wins_and_movements_from_before_it_do_not_count() -> None:
    with running(2) as server:
        fresh, resumed = server.come(0), server.come(1)
        _, before, _ = joined(fresh, 0.0)
        push(fresh, 1.0, before["lineage"])
        founds, header, weights = joined(resumed, 5.0, version=40)
        assert founds and header["version"] == 40 and weights.eq(5).all()
        answer, weights = push(fresh, 1.0, before["lineage"])
        assert not answer["counts"] and weights.eq(5).all(), "it goes on from the checkpoint"
        answer, weights = push(fresh, 1.0, answer["lineage"])
        assert answer["counts"] and answer["version"] == 41
        assert joined(server.come(1), 9.0, version=40)[0] is False, "one that comes again with its old checkpoint"


def test_one_that_dies_before_it_brought_the_weights_leaves_the_place_to_the_next() -> None:
    with running(2) as server:
        dying = server.come(0)
        header, _ = dying.ask("join", version=0, shapes=[["w", [3]]], cells=[["w", [3], [0], [3]]])
        assert header["founds"]
        dying.calls.put(None)
        assert joined(server.come(1), 3.0)[0]


def test_another_model_is_refused_by_name() -> None:
    with running(2) as server:
        joined(server.come(0), 1.0)
        _, header, _ = joined(server.come(1), 1.0, shape=(4,))
        assert header["error"] == "w is (4,) in replica 1, (3,) here"
        assert list(server.server._active) == [0], "it does not count"


def test_one_that_waits_while_another_comes_with_its_number_is_told() -> None:
    with running(2) as server:
        first = server.come(0)
        joined(first, 1.0)
        second = server.come(0)
        assert first.answers.get(timeout=30)[0] == {"closed": True}
        assert joined(second, 9.0)[0] is False
        assert server.server.log[-1] == ("join", 0, 1)


def test_slower_replicas_make_fewer_steps_and_one_that_rests_does_not_count() -> None:
    with running(2) as server:
        fast, slow = server.come(0), server.come(1)
        lineage = joined(fast, 0.0)[1]["lineage"]
        joined(slow, 0.0)
        assert push(fast, 0.0, lineage, steps=10, seconds=1.0)[0]["every"] == 10
        assert push(slow, 0.0, lineage, steps=10, seconds=2.6)[0]["every"] == 4
        assert push(slow, 0.0, lineage, steps=1, seconds=60.0)[0]["every"] == 1
        fast.ask("rest")
        assert push(slow, 0.0, lineage, steps=1, seconds=60.0)[0]["every"] == 10, "it is the fastest now"
        assert server.server.log[-1] == ("push", 1, 1)
    with running(1, CONFIG.model_copy(update={"dynamic_steps": False})) as server:
        link = server.come(0)
        lineage = joined(link, 0.0)[1]["lineage"]
        assert push(link, 0.0, lineage, steps=1, seconds=60.0)[0]["every"] == 10


@given(
    pushes=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=12),
    replicas=st.integers(1, 4),
    factor=st.sampled_from((0.0, 0.5, 0.9)),
)
def test_a_round_of_equal_weights_is_one_step_of_the_mean(pushes: list[float], replicas: int, factor: float) -> None:
    """After each whole round the weights are those of torch's SGD with Nesterov's momentum on the rounds' means."""
    outer = DelayedNesterov(2, 0.7, factor)
    expected = torch.zeros(2, requires_grad=True)
    sgd = torch.optim.SGD([expected], lr=0.7, momentum=factor, nesterov=factor > 0)
    for at, moved in enumerate(pushes, 1):
        outer.push(torch.full((2,), moved), replicas)
        if at % replicas == 0:
            expected.grad = torch.full((2,), sum(pushes[at - replicas : at]) / replicas)
            sgd.step()
            torch.testing.assert_close(outer.weights, expected.detach(), rtol=1e-5, atol=1e-6)


@given(data=st.data(), shape=st.lists(st.integers(1, 5), max_size=3).map(tuple), servers=st.integers(1, 4))
def test_each_element_is_in_one_cell_of_the_rank_that_keeps_its_row(
    data: st.DataObject, shape: tuple[int, ...], servers: int
) -> None:
    whole = torch.arange(int(torch.tensor(shape).prod()) if shape else 1, dtype=torch.float32).view(shape)
    held = TensorSlice.all(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, whole.numel()), max_size=3)))
    found: list[tuple[int, float]] = []
    for start, stop in zip([0, *cuts], [*cuts, whole.numel()], strict=True):
        buffer = torch.cat([torch.full((2,), -1.0), whole.view(-1)[start:stop]])
        for server, cell in cells_for("w", held, start, stop, 2, servers):
            values = cell.view(buffer)
            assert torch.equal(
                values, whole[tuple(slice(o, o + s) for o, s in zip(cell.offsets, cell.sizes, strict=True))]
            )
            found += [(server, float(value)) for value in values.reshape(-1)]
    rows = whole.view(shape[0], -1) if shape else whole.view(1, 1)
    for server in range(servers):
        first, last = rows_of(shape, server, servers)
        assert sorted(value for at, value in found if at == server) == rows[first:last].reshape(-1).tolist()
