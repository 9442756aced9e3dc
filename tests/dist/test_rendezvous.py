"""How the ranks of one start meet: one port, whatever an earlier start left, and what that asks of the store."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from hf_dist.dist import rendezvous
from hf_dist.dist.patience import Patience
from hf_dist.dist.rendezvous import agree_on_port, interface_of
from hf_dist.errors import TopologyError


class Store:
    """torch's store as a dict; what each thread asks of it is counted."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.here = threading.local()
        self.requests: Counter[int] = Counter()
        self.nbytes: Counter[int] = Counter()

    def count(self, *texts: str | bytes) -> None:
        rank = getattr(self.here, "rank", 0)
        self.requests[rank] += 1
        self.nbytes[rank] += sum(map(len, texts))

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        self.count(*keys, *values)
        with self.changed:
            self.values.update({key: value.encode() for key, value in zip(keys, values, strict=True)})
            self.changed.notify_all()

    def set(self, key: str, value: str) -> None:
        self.multi_set([key], [value])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = [self.values[key] for key in keys]
        self.count(*keys, *found)
        return found

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def wait(self, keys: Sequence[str], patience: timedelta) -> None:
        self.count(*keys)
        with self.changed:
            if not self.changed.wait_for(lambda: all(key in self.values for key in keys), patience.total_seconds()):
                raise dist.DistStoreError("wait timeout")


class Played(Store):
    """Rank 0 asks; all others are played: each answers an offer to its word at once."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.ranks = {f"hf_dist/offer/word{rank}": rank for rank in range(1, world)}
        self.values = {f"hf_dist/hello/{rank}": f"word{rank}".encode() for rank in range(1, world)}

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        super().multi_set(keys, values)
        for key, value in zip(keys, values, strict=True):
            if key in self.ranks:
                self.values[f"hf_dist/ack/{json.loads(value)[0]}/{self.ranks[key]}"] = b""


def meet(store: Any, world: int, late: Sequence[int] = ()) -> list[Any]:
    """The ports that `world` ranks found, as threads; the `late` ones come half a second after the others."""
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        store.here.rank = rank
        time.sleep(0.5 if rank in late else 0)
        found[rank] = agree_on_port(store, rank, world, timedelta(seconds=20))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found.get(rank) for rank in range(world)]


def test_what_the_ranks_ask_of_the_store_grows_as_their_number() -> None:
    per_rank = []
    for world in (8, 64):
        store = Store()
        ports = meet(store, world)
        assert len(set(ports)) == 1 and ports[0] > 0
        assert all(store.requests[rank] < 8 for rank in range(1, world)), "whoever waits asks once"
        assert max(store.nbytes[rank] for rank in range(1, world)) < 1000
        per_rank.append(store.nbytes[0] / world)
    assert per_rank[1] == pytest.approx(per_rank[0], rel=0.2)


def test_rank_0_of_4096_asks_for_each_of_the_others_once() -> None:
    store = Played(4096)
    assert agree_on_port(store, 0, 4096, timedelta(seconds=20)) > 0  # type: ignore[arg-type]
    assert store.requests[0] < 10
    assert store.nbytes[0] < 4096 * 500


def test_answers_of_an_earlier_start_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ASK_AGAIN", timedelta(seconds=0.1))
    store = Store()
    before = meet(store, 4)
    # Rank 0 finds the words of the earlier start first, and offers to ranks that are gone.
    after = meet(store, 4, late=(1, 3))
    assert len(set(before)) == len(set(after)) == 1
    assert before != after, "the port of a store that is gone"
    assert meet(store, 4, late=(0,))[1] not in (before[0], after[0]), "the others heard of the rank 0 before only"


def test_a_rank_0_that_is_about_to_end_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ASK_AGAIN", timedelta(seconds=0.1))
    store = Store()
    for rank in range(1, 3):
        threading.Thread(target=lambda r=rank: agree_on_port(store, r, 3, timedelta(seconds=20)), daemon=True).start()
    while len(store.values) < 2:
        time.sleep(0.01)
    words = [store.get(f"hf_dist/hello/{rank}").decode() for rank in (1, 2)]
    for word in words:
        store.set(f"hf_dist/offer/{word}", json.dumps(["round of a process that is gone", 1]))
    time.sleep(0.3)
    assert agree_on_port(store, 0, 3, timedelta(seconds=20)) > 1  # type: ignore[arg-type]


def test_ranks_that_do_not_come_are_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ASK_AGAIN", timedelta(seconds=0.05))
    for rank in (0, 1):
        with pytest.raises(TopologyError, match=f"rank {rank} did not find the 3 ranks"):
            agree_on_port(Store(), rank, 3, timedelta(seconds=0.2))  # type: ignore[arg-type]


# ---- gloo's interface


def test_an_address_of_this_machine_has_an_interface() -> None:
    name = interface_of("127.0.0.1")
    assert name in {found for _, found in socket.if_nameindex()}
    assert interface_of("192.0.2.77") == ""
    assert interface_of("no address") == ""


@pytest.mark.parametrize(
    ("local", "given", "address", "chosen"),
    [
        ("2", None, "10.0.0.5", "eth7"),
        ("2", "ib0", "10.0.0.5", "ib0"),
        ("4", None, "10.0.0.5", None),
        ("2", None, "127.0.1.1", "eth0"),
    ],
    ids=["several_machines", "somebody_has_said", "one_machine", "own_name_is_loopback"],
)
def test_gloo_takes_the_interface_that_the_other_machines_reach(
    local: str, given: str | None, address: str, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "GLOO_SOCKET_IFNAME", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.setenv(name, "")  # so that what is written there is undone
        monkeypatch.delenv(name)
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": local, "MASTER_ADDR": "node7"}.items():
        monkeypatch.setenv(name, value)
    if given is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    routes = {"node7": address, rendezvous._ELSEWHERE: "10.9.9.9"}
    monkeypatch.setattr(rendezvous, "_address_towards", routes.__getitem__)
    monkeypatch.setattr(rendezvous, "interface_of", {"10.0.0.5": "eth7", "10.9.9.9": "eth0"}.get)
    rendezvous.prepare_start()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == chosen


@pytest.mark.parametrize("who", ["mute", "closes", "store", "nobody"])
def test_what_answers_at_the_port_is_told_from_a_store(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER", timedelta(seconds=2 if who == "store" else 0.5))
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]

    def close_each() -> None:
        with contextlib.suppress(OSError):
            while True:
                server.accept()[0].close()

    if who == "closes":
        threading.Thread(target=close_each, daemon=True).start()
    elif who != "mute":
        server.close()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if who == "store" else None
    assert rendezvous._is_strange("127.0.0.1", port) is (who in ("mute", "closes"))
    assert rendezvous._can_listen(port) is (who == "nobody")
    server.close()
    del store


@pytest.mark.parametrize(
    ("rank", "listens", "says"),
    [
        (
            0,
            False,
            "rank 0 has waited for 0 s for ranks 1 to 3: not all have come to 127.0.0.1:PORT. WORLD_SIZE=4: start 4",
        ),
        (1, False, "rank 1 has waited for 0 s for rank 0: nothing listens at 127.0.0.1:PORT. WORLD_SIZE=4: start 4"),
        (1, True, ""),  # rank 0 speaks
        (3, False, ""),
    ],
)
def test_ranks_that_do_not_meet_say_whom_they_wait_for(
    rank: int, listens: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    looked = threading.Event()
    monkeypatch.setattr(rendezvous, "print_error", said.append)
    monkeypatch.setattr(rendezvous, "_telling", False)
    monkeypatch.setattr(rendezvous, "_MISSING_AFTER", 0.05)
    is_open = rendezvous._is_open

    def look(address: str, port: int) -> bool:
        found = is_open(address, port)
        looked.set()
        return found

    monkeypatch.setattr(rendezvous, "_is_open", look)
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    if not listens:
        server.close()
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))

    def init_process_group(wait: Callable[[], bool]) -> None:
        assert Patience(20).until(wait)

    thread = rendezvous._tell_who_is_missing("127.0.0.1", port)
    init_process_group(lambda: bool(said) if says else looked.is_set() or rank == 3)
    assert [line.startswith("hf_dist: " + says.replace("PORT", str(port))) for line in said[:1]] == [True] * bool(says)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    if thread is not None:
        thread.join()
    server.close()


def test_a_script_that_does_something_else_before_it_meets_the_others_says_nothing() -> None:
    def init_process_group() -> bool:
        return rendezvous._is_meeting(threading.get_ident())

    assert not rendezvous._is_meeting(threading.get_ident())
    assert init_process_group()
