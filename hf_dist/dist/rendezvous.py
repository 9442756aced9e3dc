"""How the ranks of one start find each other: their own store, a reachable network interface, and variables for CUDA.

Only rank 0's requests to a store grow with the number of ranks: one key per rank.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
import sys
import threading
import time
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_dist.dist.excepthook import print_error
from hf_dist.dist.host_info import ranks_here, schedule_as_batch
from hf_dist.dist.ports import HeldPort
from hf_dist.errors import TopologyError

__all__ = [
    "CONNECTIONS",
    "DEFAULT_TIMEOUT",
    "agree_on_port",
    "has_started",
    "have_come",
    "interface_of",
    "job_store",
    "meet_as",
    "own_address",
    "prepare_start",
    "release_port",
    "start_store",
]

DEFAULT_TIMEOUT = timedelta(minutes=30)
_ASK_AGAIN = timedelta(seconds=1)
"""Interval at which rank 0 looks for new words of restarted ranks, and the others for a new word of rank 0."""
_ARRIVAL = timedelta(seconds=10)
"""Longest single wait in the store. Each wait without an answer makes torch log two lines; Ctrl-C takes effect after it."""
_ELSEWHERE = "192.0.2.1"
"""An address of a reserved network (RFC 5737), to find the interface that leads away from this machine."""
_SIOCGIFADDR = 0x8915
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_ANSWER = timedelta(seconds=5)
"""In which a store answers."""
_MISSING_AFTER = 30.0
"""Seconds after which a rank says whom it waits for."""
_MEETING = ("start_store", "init_process_group")
_telling = False
_checked: tuple[str, int] | None = None
_held: HeldPort | None = None
"""The port that rank 0 has offered, until its store listens there."""


def prepare_start() -> None:
    """Prepare the environment before CUDA and process groups start. Every rank calls it; repeated calls are allowed.

    Raises `TopologyError` if the ranks do not find each other.
    """
    if torch.version.cuda is not None and not torch.cuda.is_initialized():
        # The default is 8. With more streams (each communicator uses one), some share a hardware queue, where a kernel that
        # waits for another rank can block the kernel that this rank waits for: a deadlock.
        os.environ.setdefault(CONNECTIONS, "32")
    if not torch.cuda.is_available():
        schedule_as_batch()
    _choose_interface()
    if _starts_alone():
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        _check_master_port(address, port)
        _tell_who_is_missing(address, port)
    _leave_agent_store()


def _starts_alone() -> bool:
    """Whether rank 0 of this job will listen at MASTER_PORT, and no launcher does."""
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK")
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") in ("True", "False")
    return (
        int(os.environ.get("WORLD_SIZE", "1")) > 1
        and all(map(os.environ.get, names))
        and not (launched or dist.is_initialized())
    )


def _check_master_port(address: str, port: int) -> None:
    """Raise `TopologyError` if another program listens at MASTER_PORT: on rank 0, which cannot, and on the ranks that would
    wait for an answer until the time-out. Local."""
    global _checked
    if _checked == (address, port):
        return
    taken = not _can_listen(port) if os.environ["RANK"] == "0" else _is_strange(address, port)
    if taken:
        with HeldPort() as free:
            raise TopologyError(
                f"MASTER_PORT={port}: another program listens there on {address}, so the ranks of this job cannot meet. Set "
                f"MASTER_PORT to a free port, such as {free.number}, on every rank."
            )
    _checked = address, port


def _can_listen(port: int) -> bool:
    """Whether this process could listen at the port, as a store does. Other errors are left to the store."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            tried.bind(("", port))  # without listening: another rank would take it for the store
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def _is_strange(address: str, port: int) -> bool:
    """Whether something answers there that is no store. Where nothing listens yet, rank 0 has not come so far."""
    answered, asking = threading.Event(), threading.Event()

    def ask() -> None:  # beside this thread: the constructor waits for an answer far longer than its `timeout`
        with contextlib.suppress(dist.DistError):
            dist.TCPStore(address, port, is_master=False, timeout=_ANSWER, wait_for_workers=False)
            answered.set()
        asking.clear()

    for _ in range(2):  # it may have ended in between
        if not _is_open(address, port):
            return False
        if not asking.is_set():
            asking.set()
            threading.Thread(target=ask, daemon=True).start()
        if answered.wait(_ANSWER.total_seconds()):
            return False
    return True


def _tell_who_is_missing(address: str, port: int) -> threading.Thread | None:
    """Say from a thread, ever rarer, whom this rank waits for until the ranks have met: torch says nothing. Local."""
    global _telling
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if _telling or (rank > 1 and os.environ.get("LOCAL_RANK") != "0"):
        return None
    _telling, main = True, threading.get_ident()

    def tell() -> None:
        waited, pause = 0.0, _MISSING_AFTER
        while not dist.is_initialized() and waited < DEFAULT_TIMEOUT.total_seconds():
            time.sleep(pause)
            waited += pause
            pause = waited
            if dist.is_initialized() or not _is_meeting(main) or (rank > 0 and _is_open(address, port)):
                continue  # where rank 0 is there, it speaks
            print_error(_who_is_missing(rank, world, f"{address}:{port}", waited))

    thread = threading.Thread(target=tell, name="hf_dist start", daemon=True)
    thread.start()
    return thread


def _who_is_missing(rank: int, world: int, place: str, waited: float) -> str:
    others = "rank 1" if world == 2 else f"ranks 1 to {world - 1}"
    whom = f"rank 0: nothing listens at {place}" if rank else f"{others}: not all have come to {place}"
    return (
        f"hf_dist: rank {rank} has waited for {waited:.0f} s for {whom}. WORLD_SIZE={world}: start {world} processes with the "
        f"same MASTER_ADDR and MASTER_PORT, and with RANK=0 to {world - 1}, or let `torchrun` start them."
    )


def _is_meeting(thread: int) -> bool:
    """Whether that thread waits where ranks meet, and not in something of the script's before."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_name in _MEETING:
            return True
        frame = frame.f_back
    return False


def _is_open(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=_ANSWER.total_seconds()).close()
    except OSError:
        return False
    return True


def _leave_agent_store() -> None:
    """Make the ranks of this start use a store of their own.

    torchrun keeps one store for all its restarts (torch 2.13, `DynamicRendezvousHandler.next_rendezvous`), so groups made after
    a restart would read the addresses of dead processes. A no-op under other launchers.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or world == 1 or dist.is_initialized():
        return
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    port = agree_on_port(store, int(os.environ["RANK"]), world)
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")


def agree_on_port(store: dist.Store, rank: int, world: int, patience: timedelta = DEFAULT_TIMEOUT) -> int:
    """Agree on a free port of rank 0's machine, through a store that may hold answers of an earlier start. Collective.

    hello (each rank's new word) -> offer (stored under that word: the round, named by rank 0's word, and the port) -> ack (each
    rank to the round) -> go (for the round). Ranks wait inside the store, which answers once.
    """
    hello = uuid.uuid4().hex
    deadline = time.monotonic() + patience.total_seconds()
    if rank == 0:
        port = _offer_port(store, hello, world, deadline)
    else:
        store.set(f"hf_dist/hello/{rank}", hello)
        port = _take_port(store, hello, rank, deadline)
    if port is None:
        raise TopologyError(f"rank {rank} did not find the {world} ranks of this job within {patience}")
    return port


def _offer_port(store: Any, word: str, world: int, deadline: float) -> int | None:
    global _held
    offered = HeldPort()  # before the last one is given back: not the same
    release_port()
    _held, port = offered, offered.number
    others = range(1, world)
    hellos = [f"hf_dist/hello/{rank}" for rank in others]
    offer = json.dumps([word, port])
    while time.monotonic() < deadline:
        if not have_come(store, hellos, _arrival(deadline)):
            continue
        # Answer all ranks each time: rank 0 of the previous start may still be alive and overwrite offers.
        words = [found.decode() for found in store.multi_get(hellos)]
        store.multi_set([f"hf_dist/offer/{found}" for found in words], [offer] * len(words))
        if have_come(store, [f"hf_dist/ack/{word}/{rank}" for rank in others], _ASK_AGAIN):
            store.set(f"hf_dist/go/{word}", "")
            return port
    return None


def release_port() -> None:
    """Stop holding the offered port: call it when the store of this start listens there. Local; allowed on every rank."""
    global _held
    if _held is not None:
        _held.release()
    _held = None


def _take_port(store: dist.Store, hello: str, rank: int, deadline: float) -> int | None:
    acknowledged = ""
    while time.monotonic() < deadline:
        if not have_come(store, [f"hf_dist/offer/{hello}"], _arrival(deadline)):
            continue
        word, port = json.loads(store.get(f"hf_dist/offer/{hello}"))
        if word != acknowledged:
            acknowledged = word
            store.set(f"hf_dist/ack/{word}/{rank}", "")
        if have_come(store, [f"hf_dist/go/{word}"], _ASK_AGAIN):
            return int(port)
    return None


def _arrival(deadline: float) -> timedelta:
    return min(_ARRIVAL, timedelta(seconds=max(deadline - time.monotonic(), 0.001)))


def have_come(store: dist.Store, keys: list[str], patience: timedelta) -> bool:
    """Whether these keys are in the store; waits so long for them."""
    try:
        store.wait(keys, patience)
    except dist.DistStoreError:
        return False
    return True


def has_started() -> bool:
    """Whether torch.distributed has its default group. Local."""
    return dist.is_initialized()


def start_store(rank: int, world: int) -> dist.Store:
    """A store of all processes of a start, on rank 0, beside those of the process groups. Collective, after `prepare_start`."""
    release_port()
    if world == 1:  # perhaps without a launcher, so without an address
        return dist.HashStore()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, world, is_master=rank == 0, timeout=DEFAULT_TIMEOUT)


def meet_as(name: str, rank: int, store: dist.Store) -> None:
    """Make the processes that call it with the same name meet at a store of their own, on the first one's machine.

    `rank`: among these processes. `store`: reached by all of them. Changes MASTER_ADDR and MASTER_PORT. Collective.
    """
    global _held
    key = f"hf_dist/meet/{name}"
    if rank == 0:
        address = own_address()
        _held = HeldPort()
        store.set(key, json.dumps([address, _held.number]))
    address, port = json.loads(store.get(key))
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")


def job_store() -> dist.Store | None:
    """The store through which the ranks of this job found each other; None before that, or for one process. Local."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.distributed_c10d._get_default_store()


def own_address() -> str:
    """This machine's address as other ranks reach it: that of the interface towards rank 0. Local."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    return master if int(os.environ.get("RANK", "0")) == 0 else _address_towards(master)


def _address_towards(host: str) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # connecting a datagram socket sends nothing
        return str(probe.getsockname()[0])


def _choose_interface() -> None:
    """Make gloo use the interface towards the other machines, if there are any and the user has not chosen one.

    gloo's default is the interface of the host name, which many systems resolve to 127.0.1.1. A job over NCCL would then fail
    in its gloo groups.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or ranks_here() >= int(os.environ.get("WORLD_SIZE", "1")):
        return
    with contextlib.suppress(OSError):
        address = _address_towards(os.environ["MASTER_ADDR"])
        if address.startswith("127."):  # rank 0's own name for itself
            address = _address_towards(_ELSEWHERE)
        name = interface_of(address)
        if name:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_of(address: str) -> str:
    """The name of the network interface with this IPv4 address; "" if there is none or this is not Linux. Local."""
    try:
        import fcntl

        packed = socket.inet_aton(address)
    except (ImportError, OSError):
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if found[20:24] == packed:
                    return name
    return ""
