# SPDX-License-Identifier: Apache-2.0
"""The door at which machines join: who may, with what, and what strangers cost."""

import json
import signal
import socket
import ssl
import struct
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.local_devices import LocalDevice
from hetjax.comm.addresses import endpoint
from hetjax.comm.callers import _MOST_WAITING
from hetjax.comm.handshake import read
from hetjax.comm.pinned import (
    OtherCertificate,
    dial_pinned,
    kept_certificate,
    read_fingerprint,
    spelled,
)
from hetjax.comm.tls import TlsStream
from hetjax.errors import BadInput, RunFailed
from hetjax.launchers import by_joining
from hetjax.launchers.joining import hello as words
from hetjax.launchers.joining.desk import Desk
from hetjax.launchers.joining.hello import Hello
from hetjax.launchers.joining.joiner import Joining, _introduce, _Joined, join
from hetjax.launchers.joining.terms import JoinTerms
from hetjax.launchers.joining.tokens import JoinTokens, read_token
from hetjax.launchers.launcher import Launcher, LaunchRequest, launcher_file
from hetjax.launchers.reprovisioning import Follow, Missing
from hetjax.runtime.rpc.worker_connections import WorkerLost
from tests.training.pair import wait_until

T4 = LocalDevice(platform="cuda", device_kind="Tesla T4", handle="0", memory_bytes=0)
L4 = replace(T4, device_kind="NVIDIA L4", handle="1")
CLUSTER = Cluster(
    name="lab",
    nodes=(
        Node(name="old", device="T4", count=2),
        Node(name="slice", device="cpu", count=4, hosts=2),
    ),
)


class Door:
    """A desk in a folder, and calls to it."""

    def __init__(self, folder: Path, **terms: Any) -> None:
        self.folder, self.own = folder, kept_certificate(folder)
        self.tokens = JoinTokens(folder, 60.0)
        given: dict[str, Any] = {"only_cpu": False, **terms}
        self.desk = Desk("127.0.0.1:0", self.own, self.tokens, CLUSTER, **given)

    def token(self, worker: str) -> bytes:
        found = read_token(self.tokens.file(worker).read_text())
        assert found is not None
        return found

    def dialled(self) -> TlsStream:
        end_s = time.monotonic() + 30.0
        return dial_pinned(self.desk.address, self.own.fingerprint, end_s)

    def joining(self, worker: str, **more: str) -> Joining:
        return Joining(
            address=self.desk.address,
            worker=worker,
            fingerprint=self.own.fingerprint,
            token=self.token(worker),
            **more,
        )

    def join(self, worker: str, *devices: LocalDevice, **more: str) -> TlsStream:
        """Join as `hetjax worker` does; raises the same errors."""
        stream = self.dialled()
        _introduce(stream, self.joining(worker, **more), list(devices))
        return stream


@contextmanager
def door(folder: Path, **terms: Any) -> Iterator[Door]:
    found = Door(folder, **terms)
    try:
        yield found
    finally:
        found.desk.close(is_done=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "join"


@pytest.mark.filterwarnings("ignore:.*may not join")
def test_a_node_of_the_file_joins_with_its_devices_and_no_others(folder: Path):
    with door(folder) as found:
        for devices in ((), (T4,), (T4, L4), (L4, L4)):
            with pytest.raises(BadInput, match="'old' wants 2 x T4 on this machine"):
                found.join("old", *devices)
        assert not found.desk.machines
        with closing(found.join("old", T4, L4, T4)):
            assert [*found.desk.machines] == ["old"]


@pytest.mark.filterwarnings("ignore:.*may not join")
def test_hosts_of_a_node_join_one_by_one(folder: Path):
    with door(folder) as found:
        with (
            closing(found.join("slice/0")),
            closing(found.join("slice/1", own_address="10.9.8.7")),
        ):
            machines = found.desk.machines
            assert {n: m.address for n, m in machines.items()} == {
                "slice/0": "127.0.0.1",
                "slice/1": "10.9.8.7",
            }
            for address in ("0.0.0.0", "here; rm", "::1"):
                with pytest.raises(BadInput, match="--address"):
                    found.join("slice/1", own_address=address)


@pytest.mark.filterwarnings("ignore:.*may not join")
def test_a_function_is_the_model_only_where_the_machine_allows_it(folder: Path):
    with door(folder, only_cpu=True, model_code="mine:model") as found:
        for allows in ("", "mine:other"):
            with pytest.raises(BadInput, match="--allow-model-code mine:model"):
                found.join("old", allows=allows)
        with closing(found.join("old", allows="mine:model")):
            assert [*found.desk.machines] == ["old"]


@pytest.mark.filterwarnings("ignore:.*may not join")
def test_a_token_lets_one_machine_in_once_and_in_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    with door(folder, only_cpu=True) as found:
        token, now_s = found.token("old"), time.monotonic()
        stream = found.join("old")
        assert found.token("old") != token
        with pytest.raises(RunFailed, match="127.0.0.1 has joined as"):
            found.join("old")  # a good token, which stays good
        stream.close()
        wait_until(lambda: not found.desk.machines)
        monkeypatch.setattr(found, "token", lambda worker: token)
        with pytest.raises(BadInput, match="a token of old that was used before"):
            found.join("old")
        monkeypatch.undo()
        found.join("old").close()
        wait_until(lambda: not found.desk.machines)
        clock = SimpleNamespace(monotonic=lambda: now_s + 45.0)
        monkeypatch.setattr("hetjax.launchers.joining.tokens.time", clock)
        before = found.token("old")  # valid for less than half its time
        found.desk.follow(CLUSTER)
        assert found.token("old") != before
        monkeypatch.setattr(found, "token", lambda worker: before)
        found.join("old").close()  # and still valid
        wait_until(lambda: not found.desk.machines)
        monkeypatch.undo()
        clock.monotonic = lambda: now_s + 106.0
        monkeypatch.setattr("hetjax.launchers.joining.tokens.time", clock)
        with pytest.raises(BadInput, match="a token of old that has expired"):
            found.join("old")


def test_two_machines_with_one_token_at_once_are_one_machine(folder: Path):
    tokens = JoinTokens(folder_of(folder), 60.0)
    tokens.renew(["old"])
    key = read_token(tokens.file("old").read_text())
    token = tokens.proven(lambda found: found == key)
    assert token is not None
    assert [tokens.use(token) for _ in range(3)] == [True, False, False]


def folder_of(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_nobody_else_reads_what_is_in_the_folder_and_it_is_kept(folder: Path):
    with door(folder) as found:
        assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o600}
        assert folder.stat().st_mode & 0o777 == 0o700
        fingerprint = found.own.fingerprint
    assert [*folder.glob("*.token")] == []
    assert kept_certificate(folder).fingerprint == fingerprint
    told = subprocess.run(
        ["openssl", "x509", "-noout", "-fingerprint", "-sha256", "-in"]
        + [str(folder / "certificate.pem")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    digits = told.strip().partition("=")[2].replace(":", "").lower()
    assert spelled(fingerprint) == f"sha256:{digits}"
    assert read_fingerprint(spelled(fingerprint)) == fingerprint


def test_nothing_is_sent_to_another_certificate(folder: Path, tmp_path: Path):
    with door(folder) as found:
        other = kept_certificate(tmp_path / "other").fingerprint
        heard = []
        found.tokens.proven = lambda is_proof: heard.append(1)
        with pytest.raises(OtherCertificate) as told:
            dial_pinned(found.desk.address, other, time.monotonic() + 30.0)
        assert told.value.found == spelled(found.own.fingerprint)
        assert not heard


@pytest.mark.filterwarnings("ignore:a caller without a token")
def test_who_stands_in_between_cannot_pass_a_proof_on(folder: Path, tmp_path: Path):
    """It got the proof of a machine that was shown its certificate."""
    between = kept_certificate(tmp_path / "between").fingerprint
    with door(folder, only_cpu=True) as found:
        said = Hello(worker="old", versions=words.versions_here()).text()
        for fingerprint in (between, found.own.fingerprint):
            with closing(found.dialled()) as stream:
                end_s = time.monotonic() + 30.0
                nonce = read(stream, words.NONCE_BYTES, end_s)
                seen: Any = SimpleNamespace(binding=sha256(b"").digest() + fingerprint)
                words.send_frame(stream, said)
                stream.sendall(words.proof(found.token("old"), nonce, said, seen))
                answer = words.receive(stream, end_s)
                if fingerprint == between:
                    assert "a token that is wrong" in answer["refused"]["got"]
                    assert not found.desk.machines
        assert answer == {"welcome": "old"}


def test_what_strangers_send_takes_no_memory(folder: Path):
    """They announce a large message and send part of it, all at once."""
    with door(folder) as found:
        strangers = [found.dialled() for _ in range(8)]
        tracemalloc.start()
        for stream in strangers:
            with suppress(OSError):
                stream.sendall(struct.pack("<I", 0xFFFFFFFF) + bytes(100_000))
        for stream in strangers:
            with suppress(OSError):
                while stream.recv(1000):
                    pass
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        for stream in strangers:
            stream.close()
    assert peak < 8 * 400_000  # both sides, with data in transit


def test_many_who_say_nothing_keep_nobody_out(folder: Path):
    with door(folder, only_cpu=True) as found:
        end = endpoint(found.desk.address)
        assert isinstance(end, tuple)
        silent = [socket.create_connection(end) for _ in range(_MOST_WAITING + 20)]
        with closing(found.join("old")):
            assert [*found.desk.machines] == ["old"]
        for one in silent:
            one.close()


def test_an_older_tls_is_no_way_in(folder: Path):
    with door(folder) as found:
        end = endpoint(found.desk.address)
        assert isinstance(end, tuple)
        older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        older.check_hostname, older.verify_mode = False, ssl.CERT_NONE
        older.maximum_version = ssl.TLSVersion.TLSv1_2
        with socket.create_connection(end) as plain, pytest.raises(ssl.SSLError):
            older.wrap_socket(plain)


@pytest.mark.parametrize(
    "said",
    [
        {"start": "1", "ended": 0},
        {"ended": 0},
        {"notice": "soon"},
        {"notice": [1]},
        [1, 2],
        "x" * (words.MESSAGE_BYTES + 1),
    ],
)
@pytest.mark.filterwarnings("ignore:.*sent an unreadable message")
def test_a_machine_that_sends_what_is_no_message_has_to_join_again(
    folder: Path, said: Any
):
    with door(folder, only_cpu=True) as found:
        with closing(found.join("old")) as stream:
            assert [*found.desk.machines] == ["old"]
            words.send_frame(stream, json.dumps(said).encode())
            wait_until(lambda: not found.desk.machines)
        with closing(found.join("old")):
            assert [*found.desk.machines] == ["old"]


@pytest.mark.parametrize(
    ("is_done", "failure"), [(True, ""), (False, "has stopped before its last step")]
)
def test_a_machine_hears_how_the_run_ends(folder: Path, is_done: bool, failure: str):
    with door(folder, only_cpu=True) as found:
        joining = found.joining("old")

        def end() -> None:
            wait_until(lambda: found.desk.machines)
            found.desk.close(is_done=is_done)

        ending = threading.Thread(target=end)
        ending.start()
        with pytest.raises(RunFailed, match=failure) if failure else nullcontext():
            join(joining)
        ending.join()


def test_a_machine_whose_run_is_lost_ends_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    has_joined = threading.Event()
    work = _Joined.work

    def begin(machine: _Joined) -> None:
        has_joined.set()
        work(machine)

    monkeypatch.setattr(_Joined, "work", begin)
    with door(folder, only_cpu=True) as found:

        def cut() -> None:
            assert has_joined.wait(60)
            found.desk.machines["old"].stream.shutdown(socket.SHUT_RDWR)

        cutting = threading.Thread(target=cut)
        cutting.start()
        with pytest.raises(RunFailed, match="the connection to the run .* is lost"):
            join(found.joining("old"))
        cutting.join()


def opened(
    folder: Path,
    stack: ExitStack,
    wait_s: float,
    told: list[str],
    on_waiting: Follow,
) -> Launcher:
    terms = JoinTerms(
        address="127.0.0.1:0",
        folder=folder,
        token_s=60.0,
        wait_s=wait_s,
        note=told.append,
        is_done=lambda: True,
        on_waiting=on_waiting,
    )
    request = LaunchRequest(
        cluster=CLUSTER,
        only_cpu=True,
        joins=terms,
        logs=folder,
        cache_dir=folder,
        work=lambda settings: pytest.fail("nobody asked for a step"),
    )
    return launcher_file("join").open_launcher(request, stack)


def test_a_run_waits_for_its_nodes_and_begins_with_those_that_are_there(folder: Path):
    told: list[str] = []
    missing: list[Missing] = []
    asked: list[list[str]] = []

    def on_waiting(now: Missing) -> None:
        missing.append(now)
        asked.append(names())

    def names() -> list[str]:
        return [node.name for node in missing[-1]()]

    def join_as_old() -> None:
        wait_until(lambda: told)
        address = told[0].split()[3].rstrip(";")
        key = read_token((folder / "old.token").read_text())
        pinned = read_fingerprint((folder / "fingerprint").read_text().strip())
        assert key is not None
        join(Joining(address=address, worker="old", fingerprint=pinned, token=key))

    with (
        pytest.MonkeyPatch.context() as patched,
        ExitStack() as stack,
        pytest.raises(BadInput, match="no machine .* within 0.2 s"),
    ):
        patched.setattr(by_joining, "_ASKS_AFTER_S", 0.0)
        opened(folder, stack, 0.2, told, on_waiting)
    assert asked == [["old", "slice"], []]
    told.clear()
    with pytest.MonkeyPatch.context() as patched:
        signals = NoSignals()
        late = SimpleNamespace(
            sleep=time.sleep, monotonic=lambda: 1e9 if signals.joined else 0.0
        )
        patched.setattr("hetjax.launchers.joining.joiner.signal", signals)
        patched.setattr("hetjax.launchers.by_joining.time", late)
        joining = threading.Thread(target=join_as_old)
        joining.start()
        with ExitStack() as stack:
            with pytest.warns(UserWarning, match="no machine joined as slice within"):
                launcher = opened(folder, stack, 5.0, told, on_waiting)
            assert (asked[2], names()) == ([], ["slice"])  # not within a minute
            there = launcher.present(CLUSTER, False)
            assert there is not None and [n.name for n in there.nodes] == ["old"]
            with pytest.raises(WorkerLost, match="'slice/0' has left"):
                launcher.start(["slice/0"])
        joining.join()


class NoSignals:
    """The module `signal` in a thread, where no handler can be set; notes the call."""

    SIGTERM, SIGINT = signal.SIGTERM, signal.SIGINT
    joined = False

    def signal(self, number: int, handler: object) -> object:
        self.joined = True
        return handler


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ({"device": "T4", "count": 2}, "0,2"),
        ({"device": "L4", "count": 1}, "1"),
        ({"device": "cpu", "count": 4}, "-1"),
    ],
)
def test_a_worker_sees_the_cards_of_its_node_alone(
    told: dict[str, Any], shown: str, folder: Path
):
    here = [T4, L4, replace(T4, handle="2"), replace(T4, handle="3")]
    with door(folder, only_cpu=True) as found, closing(found.join("old")) as stream:
        variables = _Joined(stream, found.joining("old"), here)._variables(told)
    assert variables["CUDA_VISIBLE_DEVICES"] == shown


@pytest.mark.filterwarnings("ignore:.*may not join")
def test_a_token_is_of_one_worker(folder: Path):
    with door(folder, only_cpu=True) as found, closing(found.dialled()) as stream:
        other = replace(found.joining("old"), token=found.token("slice/0"))
        with pytest.raises(BadInput, match="--node old with a token of slice/0"):
            _introduce(stream, other, [])
        assert not found.desk.machines


def test_a_machine_of_other_versions_is_told_what_to_install():
    here = words.versions_here()
    words.check_versions(here)
    for theirs, advice in (
        ({"jax": "0.4.1"}, f"on that machine, pip install 'jax=={here['jax']}'"),
        (
            {"hetjax": "9"},
            f"on that machine, install the run's hetjax {here['hetjax']}",
        ),
    ):
        with pytest.raises(BadInput) as caught:
            words.check_versions(here | theirs)
        assert caught.value.fix == advice
