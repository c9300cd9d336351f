# SPDX-License-Identifier: Apache-2.0
"""TLS hides all content, and only holders of our certificates take part.

The command openssl makes the certificates; these tests need it.
"""

import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from hetjax.comm.addresses import endpoint, listen
from hetjax.comm.door import Listener
from hetjax.comm.frames import Key
from hetjax.comm.handshake import HandshakeRefused, dial
from hetjax.comm.peers import PeerLost, Peers
from hetjax.comm.tls import Tls, TlsStream
from hetjax.errors import BadInput

SECRET = secrets.token_bytes(32)
KEY: Key = (1, 2, 3, 4, 5, 6)


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


def new_key(folder: Path, name: str, *more: str) -> None:
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    out = ["-keyout", f"{name}.key", "-subj", f"/CN={name}"]
    openssl(folder, "req", *curve, *out, *more)


def certified(folder: Path, name: str, authority: str) -> Tls:
    """Return a certificate of that authority."""
    new_key(folder, name, "-out", f"{name}.csr")
    sign = ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial"]
    out = ["-in", f"{name}.csr", "-out", f"{name}.pem", "-days", "2"]
    openssl(folder, "x509", "-req", *sign, *out)
    paths = (f"{name}.pem", f"{name}.key", f"{authority}.pem")
    return Tls(*(str(folder / path) for path in paths))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tls]:
    folder = tmp_path_factory.mktemp("tls")
    for authority in ("ours", "theirs"):
        new_key(folder, authority, "-x509", "-days", "2", "-out", f"{authority}.pem")
    found = {name: certified(folder, name, "ours") for name in ("one", "two", "three")}
    return found | {"stranger": certified(folder, "stranger", "theirs")}


@contextmanager
def peers_of(one: Tls | None, two: Tls | None) -> Iterator[tuple[Peers, Peers]]:
    first = Peers("one", "127.0.0.1:0", SECRET, silence_s=1.0, tls=one)
    second = Peers("two", "127.0.0.1:0", SECRET, silence_s=1.0, tls=two)
    try:
        yield first, second
    finally:
        first.close()
        second.close()


def test_messages_of_all_sizes_arrive_whole_both_ways_at_once(
    certificates: dict[str, Tls],
):
    with peers_of(certificates["one"], certificates["two"]) as (one, two):
        one.connect({"two": two.address}, 5.0)
        two.connect({"one": ""}, 5.0)
        rng = np.random.default_rng(0)
        sizes = [0, 1, 4096, 300_000, 20_000_000]
        sent = [rng.integers(0, 256, size, np.uint8) for size in sizes]
        for number, array in enumerate(sent):
            key = (0, 0, 0, 0, 0, number)
            one.send("two", key, np.array_split(array, 3))
            two.send("one", key, [array])
        for number, array in enumerate(sent):
            key = (0, 0, 0, 0, 0, number)
            np.testing.assert_array_equal(two.mailbox.receive("one", key), array)
            np.testing.assert_array_equal(one.mailbox.receive("two", key), array)
        assert isinstance(one.links["two"]._socket, TlsStream)
        with pytest.raises(PeerLost, match="'one' left"):
            one.close()
            two.mailbox.receive("one", KEY)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("stranger", "two"),  # of another authority
        ("one", "stranger"),
        (None, "two"),  # knows the secret, but uses no TLS
        ("one", None),
    ],
)
def test_who_has_no_certificate_of_the_authority_does_not_take_part(
    certificates: dict[str, Tls], one: str | None, two: str | None
):
    mine, theirs = one and certificates[one], two and certificates[two]
    with peers_of(mine or None, theirs or None) as (first, second):
        with pytest.raises(PeerLost, match="'two' cannot be reached"):
            first.connect({"two": second.address}, 5.0)
        assert not first.links and not second.links


class Between:
    """Ends TLS on both sides, with a certificate, and passes on the rest."""

    def __init__(self, address: str, own: Tls) -> None:
        self._to, self._own, self.heard = address, own, b""
        self._door, self.address = listen("127.0.0.1:0")
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._door.accept()
                called = socket.create_connection(endpoint(self._to))  # pyright: ignore
                if caller.recv(1, socket.MSG_PEEK) == b"\x16":
                    end_s = time.monotonic() + 5.0
                    caller = TlsStream(caller, self._own, True, end_s)
                    called = TlsStream(called, self._own, False, end_s)
                for both in ((caller, called), (called, caller)):
                    threading.Thread(target=self._pass, args=both, daemon=True).start()

    def _pass(self, one, other) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                self.heard += data
                other.sendall(data)
        with suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()


def test_a_third_one_of_the_same_authority_cannot_stand_in_between(
    certificates: dict[str, Tls],
):
    admitted: list[str] = []
    door = Listener(
        "two",
        "127.0.0.1:0",
        SECRET,
        lambda ends, name, number: admitted.append(name),
        certificates["two"],
    )
    between = Between(door.address, certificates["three"])
    with pytest.raises(HandshakeRefused, match="does not know this run's secret"):
        dial(between.address, "one", "two", SECRET, tls=certificates["one"])
    assert between.heard and not admitted
    between.close()
    door.close()


def test_nothing_of_a_message_is_to_be_read_on_the_way(certificates: dict[str, Tls]):
    text = np.frombuffer(b"weights " * 1000, np.uint8)

    class Listening(Between):
        def _run(self) -> None:
            with suppress(OSError):
                while True:
                    caller, _ = self._door.accept()
                    called = socket.create_connection(
                        endpoint(self._to)  # pyright: ignore
                    )
                    for both in ((caller, called), (called, caller)):
                        threading.Thread(
                            target=self._pass, args=both, daemon=True
                        ).start()

    for tls, is_read in ((None, True), (certificates["one"], False)):
        with peers_of(tls, tls and certificates["two"]) as (one, two):
            relay = Listening(two.address, certificates["three"])
            one.connect({"two": relay.address}, 5.0)
            two.connect({"one": ""}, 5.0)
            one.send("two", KEY, [text])
            np.testing.assert_array_equal(two.mailbox.receive("one", KEY), text)
            assert (b"weights weights" in relay.heard) == is_read
            relay.close()


@pytest.mark.parametrize(
    "first", [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"]
)
def test_a_handshake_within_tls_has_one_limit_however_slowly_it_comes(
    certificates: dict[str, Tls], first: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hetjax.comm.handshake._HANDSHAKE_S", 0.5)
    door = Listener(
        "two", "127.0.0.1:0", SECRET, lambda *caller: None, certificates["two"]
    )
    slow = socket.create_connection(endpoint(door.address))  # pyright: ignore
    slow.sendall(first)
    slow.settimeout(0.05)
    begin_s, is_open = time.monotonic(), True
    while is_open and time.monotonic() < begin_s + 10.0:
        with suppress(TimeoutError):
            is_open = _trickled(slow, b"\0" if first else b"")
    assert not is_open
    slow.close()
    door.close()


def _trickled(found: socket.socket, data: bytes) -> bool:
    """Send a little, then return whether the other side is still there."""
    try:
        found.sendall(data)
        return found.recv(1000) != b""
    except (ConnectionResetError, BrokenPipeError):
        return False


def test_files_that_cannot_be_used_are_refused(
    certificates: dict[str, Tls], tmp_path: Path
):
    one, two = certificates["one"], certificates["two"]
    one.check()
    for wrong in (
        Tls(one.cert, two.key, one.ca),
        Tls(str(tmp_path / "none"), one.key, one.ca),
        Tls(one.cert, one.key, one.key),
    ):
        with pytest.raises(BadInput, match="which cannot be used"):
            wrong.check()
