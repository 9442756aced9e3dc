"""A port belongs to one job until it listens there; time-outs are those of a machine with a processor for everybody."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_dist.dist import patience, ports, rendezvous
from hf_dist.dist.patience import Patience
from hf_dist.dist.ports import HeldPort
from tests import processes

LISTEN = """
import sys, torch.distributed as dist
from datetime import timedelta
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 1, True, timedelta(seconds=20))
store.set("here", "yes")
print(store.get("here").decode())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets others listen on a port that is held")
def test_a_held_port_is_for_the_store_of_a_rank_and_for_nobody_else() -> None:
    with HeldPort() as port:
        for kind, host in ((socket.AF_INET, ""), (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")):
            with socket.socket(kind) as other, pytest.raises(OSError):
                other.bind((host, port.number))
        done = processes.run([sys.executable, "-c", LISTEN, str(port.number)], timeout=120)
        assert done.stdout == "yes\n", done.stderr


def test_ports_held_at_once_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when nearly all are taken: the range has as many ports as are asked for."""
    with HeldPort() as first:
        monkeypatch.setattr(ports, "_RANGE", range(first.number, first.number + 6))
        held = [HeldPort() for _ in range(3)]
        assert len({first.number, *(port.number for port in held)}) == 4
        for port in held:
            port.release()


def test_the_port_that_rank_0_offers_is_held_until_its_store_listens() -> None:
    """What a restarted job agrees on could go to any program that asked for a free port in between."""
    import threading

    import torch.distributed as dist

    store = dist.HashStore()
    found: dict[int, int] = {}

    def agree(rank: int) -> None:
        found[rank] = rendezvous.agree_on_port(store, rank, 2)

    threads = [threading.Thread(target=agree, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("", found[0]))
    rendezvous.release_port()
    with socket.socket() as other:
        other.bind(("", found[0]))


def test_time_passes_as_slowly_as_the_machine_is_crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, crowd = [0.0], [1.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(patience, "crowding", lambda: crowd[0])
    waits = Patience(10)
    for seconds, load, over in ((4, 1, False), (4, 4, False), (4, 1, False), (2, 2, False), (1, 1, True)):
        clock[0] += seconds
        crowd[0] = load
        assert waits.is_over() is over
    assert waits.spent == 11


def test_a_load_that_is_not_ours_makes_a_hang_last_ten_times_as_long_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container of two processors sees the load of its whole host."""
    monkeypatch.setattr(patience, "processors", lambda: 2)
    for load, factor in ((0.5, 1), (6, 3), (300, 10)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0, 0))
        assert patience.crowding() == factor


def test_a_machine_that_stood_still_was_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(patience, "crowding", lambda: 1.0)
    waits = Patience(10)
    clock[0] += 3600
    assert not waits.is_over()


def test_a_command_that_outlives_its_time_is_killed_and_its_words_are_kept(tmp_path: Path) -> None:
    code = "import time; print('started', flush=True); time.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        processes.run([sys.executable, "-c", code], timeout=1)
    assert caught.value.stdout == "started\n"
