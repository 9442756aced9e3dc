"""A door lets in whoever proves the secret and proves it back; whatever else is sent there is refused, and never acted on."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_dist.dist import door as doors
from hf_dist.dist.door import VISIT, Door, Guest, knock
from hf_dist.dist.secret import PROOF, Secret
from hf_dist.errors import ConfigError, RemoteError

OURS, THEIRS = Secret("what both jobs know"), Secret("what a stranger guesses")
VISITOR = (b"v" * VISIT, 1, 3)
SECONDS = 20.0


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    made = Door(0, OURS, "teacher")
    yield made
    made.close()


def at(door: Door) -> tuple[str, int]:
    return "127.0.0.1", door.port


def anybody(guest: Guest) -> bool:
    return True


def lets_in(door: Door) -> None:
    """An honest visitor still comes in, and both ends hear each other."""
    with knock(at(door), OURS, VISITOR, SECONDS) as mine:
        guest = door.guest(anybody, SECONDS)
        assert guest is not None and (guest.visit, guest.number, guest.of) == VISITOR
        mine.sendall(b"x")
        with guest.connection as theirs:
            assert theirs.recv(1) == b"x"


def is_shut(connection: socket.socket) -> bool:
    """Whether the door closes without one byte more."""
    connection.settimeout(SECONDS)
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def greeted(door: Door) -> tuple[socket.socket, bytes]:
    """A connection, and the nonce that it was told."""
    connection = socket.create_connection(at(door), SECONDS)
    return connection, doors._taken(connection, doors._GREETING)[len(doors._HERE) :]


def a_proof(secret: Secret, nonce: bytes, number: int = 1, of: int = 3) -> bytes:
    said = doors._HERE + bytes(32) + b"v" * VISIT + struct.pack(">II", number, of)
    return said + secret.prove(b"visitor", nonce + said)


def test_who_knows_the_secret_comes_in(door: Door) -> None:
    lets_in(door)


def test_another_secret_is_refused_at_both_ends(door: Door) -> None:
    with pytest.raises(RemoteError, match="has refused this job: give both jobs the same HF_DIST_SECRET"):
        knock(at(door), THEIRS, VISITOR, SECONDS)
    assert door.guest(anybody, 0.0) is None
    lets_in(door)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(min_size=1, max_size=200), st.booleans(), st.booleans())
def test_bytes_of_a_stranger_are_refused(door: Door, sent: bytes, with_the_word: bool, ends: bool) -> None:
    connection, _ = greeted(door)
    with connection:
        whole = (doors._HERE if with_the_word else b"") + sent
        connection.sendall(whole)
        if ends or (len(whole) < doors._WHOLE and doors._HERE.startswith(whole[: len(doors._HERE)])):
            connection.shutdown(socket.SHUT_WR)
        assert is_shut(connection)
    assert door.guest(anybody, 0.0) is None


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, 8 * (8 + 32 + VISIT + 8 + PROOF) - 1))
def test_a_proof_with_any_bit_changed_is_refused(door: Door, bit: int) -> None:
    connection, nonce = greeted(door)
    with connection:
        sent = bytearray(a_proof(OURS, nonce))
        sent[bit // 8] ^= 1 << bit % 8
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert is_shut(connection)
    assert door.guest(anybody, 0.0) is None


def test_a_proof_that_was_overheard_is_good_for_nothing(door: Door) -> None:
    first, nonce = greeted(door)
    second, _ = greeted(door)
    with first, second:
        heard = a_proof(OURS, nonce)
        first.sendall(heard)
        assert len(doors._taken(first, PROOF)) == PROOF
        second.sendall(heard)
        assert is_shut(second)
    guest = door.guest(anybody, SECONDS)
    assert guest is not None and door.guest(anybody, 0.0) is None
    guest.connection.close()


def test_the_doors_own_proof_is_none_of_a_visitor(door: Door) -> None:
    """A stranger that has the door prove itself to it learns nothing with which it could come in, whatever it said before."""
    for order in (slice(None), slice(None, None, -1)):
        connection, nonce = greeted(door)
        with connection:
            said = a_proof(OURS, nonce)[:-PROOF]
            connection.sendall(said + OURS.prove(b"door", b"".join([said, nonce][order])))
            assert is_shut(connection)


def test_more_visitors_than_there_are_and_visits_that_are_over_are_closed(door: Door) -> None:
    connection, nonce = greeted(door)
    with connection:
        connection.sendall(a_proof(OURS, nonce, number=3))
        assert is_shut(connection)
    with knock(at(door), OURS, VISITOR, SECONDS) as mine:
        assert door.guest(lambda guest: guest.number == 2, 0.0) is None
        door._changed.acquire()
        door._changed.wait_for(lambda: bool(door._guests), SECONDS)
        door._changed.release()
        door.dismiss(lambda guest: guest.visit == VISITOR[0])
        assert is_shut(mine) and door.guest(anybody, 0.0) is None


def test_strangers_that_say_nothing_keep_nobody_out_and_are_few(door: Door) -> None:
    silent = [socket.create_connection(at(door), SECONDS) for _ in range(doors._AT_ONCE + 20)]
    lets_in(door)
    assert len(door._strangers) <= doors._AT_ONCE
    assert is_shut_after_greeting(silent[0])  # the oldest gave way
    for connection in silent:
        connection.close()
    lets_in(door)


def is_shut_after_greeting(connection: socket.socket) -> bool:
    doors._taken(connection, doors._GREETING)
    return is_shut(connection)


def test_who_deals_out_its_bytes_one_by_one_is_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "_SECONDS", 0.3)
    slow_door = Door(0, OURS, "teacher")
    connection, nonce = greeted(slow_door)
    with connection, contextlib.suppress(OSError):  # the door has closed
        for byte in a_proof(OURS, nonce):
            connection.sendall(bytes([byte]))
            time.sleep(0.02)
        assert is_shut(connection)
    assert slow_door.guest(anybody, 0.0) is None
    slow_door.close()


def test_a_stranger_is_named_once_and_strangers_of_many_hosts_do_not_fill_the_log(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    fresh = Door(0, OURS, "teacher")
    with caplog.at_level(logging.INFO, "hf_dist"):
        for _ in range(5):
            with pytest.raises(RemoteError):
                knock(at(fresh), THEIRS, VISITOR, SECONDS)
    said = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert (
        len(said) == 1
        and "from ::ffff:127.0.0.1" in said[0].replace(" 127", " ::ffff:127")
        and "HF_DIST_SECRET" in said[0]
    )
    assert THEIRS._key.decode() not in said[0] and len(fresh._named) == 1 <= doors._NAMED
    fresh.close()


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(40), "is no role of hf_dist"),
        (b"", "is no role of hf_dist"),
        (None, "does not know"),
    ],
)
def test_a_visitor_finds_out_what_is_no_door_and_proves_nothing_to_it_twice(says: bytes | None, words: str) -> None:
    """None: something that speaks like a door and does not know the secret."""
    with socket.create_server(("127.0.0.1", 0)) as false_door:

        def answer() -> None:
            connection, _ = false_door.accept()
            with connection:
                connection.sendall(doors._HERE + os.urandom(32) if says is None else says)
                if says is None:
                    doors._taken(connection, doors._WHOLE)
                    connection.sendall(bytes(PROOF))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RemoteError, match=words):
            knock(false_door.getsockname(), OURS, VISITOR, SECONDS)
        thread.join()


def test_a_door_that_nobody_has_opened_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        place = gone.getsockname()
    with pytest.raises(RemoteError, match=f"nobody opens at 127.0.0.1:{place[1]}"):
        knock(place, OURS, VISITOR, SECONDS)


def test_a_port_that_is_taken_is_named(door: Door) -> None:
    with pytest.raises(ConfigError, match=r"hf_dist.roles.judge.port: .* cannot be listened at"):
        Door(door.port, OURS, "judge")


@pytest.mark.parametrize(("text", "words"), [("", "is not set"), ("short", "5 characters are too few")])
def test_a_secret_that_is_none_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"HF_DIST_SECRET: .*{words}"):
        Secret(text)
