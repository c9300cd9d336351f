# SPDX-License-Identifier: Apache-2.0
"""A run on machines that join by themselves, and unwanted attempts to join.

One run of six steps serves all tests. Between its steps, strangers call, a machine is
switched off, joins again, and a worker is killed. It trains as if it had only its own
processes.
"""

import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetjax.comm.addresses import endpoint, listen
from hetjax.comm.handshake import read
from hetjax.comm.pinned import dial_pinned, read_fingerprint
from hetjax.errors import BadInput, RunFailed
from hetjax.launchers.joining import hello as words
from hetjax.launchers.joining import tokens
from hetjax.launchers.joining.hello import Hello
from hetjax.launchers.joining.joiner import Joining, join
from hetjax.launchers.joining.tokens import read_token
from hetjax.train import main
from tests.launchers.joining import joining, told
from tests.training.pair import STEPS, after_steps, trained, training, wait_until
from tests.training.small import events
from tests.training.test_workers import losses, set_environment

PATIENCE_S = 120.0
ADDRESSES = {"left": "127.0.0.1", "right": "127.0.0.2"}
SLOW_S = 1.0  # for a whole hello, to see that it ends


class JoinedRun:
    """The run, its machines, and the outcome of each other call.

    One machine gets its token from standard input, the other from a file.
    """

    def __init__(self, folder: Path) -> None:
        self.run_dir, self._folder = folder / "run", folder
        self.machines: dict[str, subprocess.Popen[str]] = {}
        self.first: dict[str, str] = {}  # the first token of each node
        self.came_of: dict[str, str] = {}  # the outcome of each call
        self.code = -1
        self.tokens_seen = set[str]()

    def join(self, node: str) -> None:
        """Start a machine with the current token; its output is appended."""
        now = told(self.run_dir)[node]
        self.first.setdefault(node, now.token)
        self.tokens_seen.add(now.token.strip())
        out = self._folder / f"{node}.out"
        typed = [*now.words, "--address", ADDRESSES[node]]
        if node == "right":
            typed += ["--token-file", str(now.token_file)]
        given = "" if node == "right" else now.token
        self.machines[node] = joining(typed, given, out)

    def join_all(self) -> None:
        wait_until(lambda: len(told(self.run_dir)) == 2, PATIENCE_S)
        for node in told(self.run_dir):
            self.join(node)

    def has_joined(self, node: str, times: int) -> bool:
        return self.output(node).count("joined as") == times

    def output(self, node: str) -> str:
        path = self._folder / f"{node}.out"
        return path.read_text() if path.exists() else ""

    def worker_of(self, node: str) -> int:
        (found,) = children(self.machines[node].pid)
        return found

    def call_all(self) -> None:
        """Make all calls while both machines are connected."""
        for name, call in CALLS.items():
            self.came_of[name] = what_came_of(lambda call=call: call(self))

    def switch_off(self, node: str) -> None:
        worker = self.worker_of(node)
        for pid in (self.machines[node].pid, worker):
            os.kill(pid, signal.SIGKILL)
        self.machines.pop(node).wait()

    def join_again(self) -> None:
        for name, call in CALLS_AS_THE_MISSING.items():
            self.came_of[name] = what_came_of(lambda call=call: call(self))
        # its last call was a good join, which has to end first
        wait_until(lambda: "has to join again" in self.log())
        self.join("right")
        wait_until(lambda: self.has_joined("right", 2), PATIENCE_S)

    def warn(self) -> None:
        """Send SIGTERM, as Kubernetes does before it stops a pod."""
        self.machines["right"].terminate()
        wait_until(lambda: "SIGTERM on right" in self.log())

    def log(self) -> str:
        return (self.run_dir / "log.txt").read_text()

    def joining_as(self, node: str, **changes: object) -> Joining:
        now = told(self.run_dir)[node]
        key = read_token(now.token)
        assert key is not None
        found = Joining(
            address=now.address,
            worker=node,
            fingerprint=read_fingerprint(now.fingerprint),
            token=key,
        )
        return replace(found, **changes)

    def stream(self, node: str = "left"):
        now = told(self.run_dir)[node]
        pinned = read_fingerprint(now.fingerprint)
        return dial_pinned(now.address, pinned, time.monotonic() + PATIENCE_S)

    def said(self, data: bytes, node: str = "left"):
        """Return the stream and the run's answer to a hello with a valid proof."""
        key, stream = self.joining_as(node).token, self.stream(node)
        end_s = time.monotonic() + PATIENCE_S
        nonce = read(stream, words.NONCE_BYTES, end_s)
        words.send_frame(stream, data)
        stream.sendall(words.proof(key, nonce, data, stream))
        return stream, words.receive(stream, end_s)

    def clock_later(self, call: Callable[[], None], by_s: float) -> None:
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + by_s)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(tokens, "time", later)
            call()


def what_came_of(call: Callable[[], str | None]) -> str:
    try:
        return call() or "joined"
    except (BadInput, RunFailed) as error:
        return f"{type(error).__name__}: {error}"


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            if f"\nPPid:\t{pid}\n" in entry.read_text():
                found.append(int(entry.parts[2]))
    return found


def hello(run: JoinedRun, **changes: object) -> bytes:
    return replace(
        Hello(worker="left", versions=words.versions_here()), **changes
    ).text()


def used_token(run: JoinedRun) -> None:
    key = read_token(run.first["left"])
    assert key is not None
    join(run.joining_as("left", token=key))


def other_version(run: JoinedRun) -> str:
    other = words.versions_here() | {"jax": "0.4.1"}
    stream, answer = run.said(hello(run, versions=other))
    stream.close()
    return json.dumps(answer)


def other_form(run: JoinedRun) -> str:
    stream, answer = run.said(hello(run).replace(b'"form": 1', b'"form": 2'))
    stream.close()
    return json.dumps(answer)


def no_json(run: JoinedRun) -> str:
    stream, answer = run.said(b"\xff{")
    stream.close()
    return json.dumps(answer)


def http(run: JoinedRun) -> str:
    with socket.create_connection(_end(run)) as found:
        found.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        found.settimeout(PATIENCE_S)
        return found.makefile("rb").read().decode()


def oversized(run: JoinedRun) -> str:
    stream = run.stream()
    end_s = time.monotonic() + PATIENCE_S
    read(stream, words.NONCE_BYTES, end_s)
    stream.sendall(struct.pack("<I", 1 << 30))
    answer = words.receive(stream, end_s)
    stream.close()
    return json.dumps(answer)


def slow(run: JoinedRun) -> str:
    """A caller that starts and never ends: first without TLS, then within it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(words, "JOIN_S", SLOW_S)
        with socket.create_connection(_end(run)) as silent:
            silent.settimeout(PATIENCE_S)
            assert silent.recv(1) == b""
        stream = run.stream()
        stream.settimeout(0.05)
        read(stream, words.NONCE_BYTES, time.monotonic() + PATIENCE_S)
        stream.sendall(struct.pack("<I", 10_000))
        sent = 0
        with suppress(OSError):
            while sent < 9_000:
                stream.sendall(b"{")
                sent += 1
                time.sleep(0.05)
        stream.close()
        return f"ended after {sent}"


def http_server(run: JoinedRun) -> None:
    """Let a machine call a server that is no run."""
    found, address = listen("127.0.0.1:0")

    def answer() -> None:
        caller, _ = found.accept()
        caller.recv(10_000)
        caller.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
        caller.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        join(run.joining_as("left", address=address))
    finally:
        thread.join()
        found.close()


def garbage_after_joining(run: JoinedRun) -> str:
    stream, answer = run.said(hello(run, worker="right"), "right")
    assert answer == {"welcome": "right"}
    stream.sendall(struct.pack("<I", 8) + secrets.token_bytes(8))
    with pytest.raises(OSError, match="end of stream|reset"):
        stream.recv(1)
    stream.close()
    return f"{answer}, then the end"


def in_a_crowd(run: JoinedRun) -> str:
    """Join while more connections are idle than the run allows."""
    crowd = [socket.create_connection(_end(run)) for _ in range(80)]
    try:
        return garbage_after_joining(run)
    finally:
        for one in crowd:
            one.close()


def _end(run: JoinedRun) -> tuple[str, int]:
    end = endpoint(told(run.run_dir)["left"].address)
    assert isinstance(end, tuple)
    return end


CALLS: dict[str, Callable[[JoinedRun], str | None]] = {
    "wrong token": lambda run: join(
        run.joining_as("left", token=secrets.token_bytes(32))
    ),
    "used token": used_token,
    "expired token": lambda run: run.clock_later(
        lambda: join(run.joining_as("left")), 3601.0
    ),
    "unknown node": lambda run: join(replace(run.joining_as("left"), worker="lefd")),
    "other node": lambda run: join(replace(run.joining_as("left"), worker="right")),
    "joined node": lambda run: join(run.joining_as("right")),
    "wrong fingerprint": lambda run: join(
        run.joining_as("left", fingerprint=secrets.token_bytes(32))
    ),
    "other version": other_version,
    "other form": other_form,
    "no JSON": no_json,
    "HTTP client": http,
    "HTTP server": http_server,
    "oversized": oversized,
    "slow": slow,
}
CALLS_AS_THE_MISSING: dict[str, Callable[[JoinedRun], str | None]] = {
    "garbage after joining": in_a_crowd,
}
# the words that the outcome of each call must contain
SAID = {
    "wrong token": [
        "BadInput",
        "got: a token that is wrong",
        "start of the run",
        "its file",
    ],
    "used token": ["BadInput", "a token of left that was used before", "allowed: a"],
    "expired token": ["BadInput", "a token of left that has expired", "--join.token-s"],
    "unknown node": ["BadInput", "--node lefd", "allowed: left, right", "'left'?"],
    "other node": ["BadInput", "--node right with a token of left", "--node left"],
    "joined node": ["RunFailed", "127.0.0.2 has joined as", "one machine for each"],
    "wrong fingerprint": ["BadInput", "shows the certificate sha256:", "nothing was"],
    "other version": ["jax 0.4.1", "the versions of the run", "pip install 'jax=="],
    "other form": ["in the format of another release", "same release"],
    "no JSON": ["an unreadable first message", "allowed", "fix"],
    "HTTP client": [
        "400",
        "got: a connection without TLS",
        "allowed: ",
        "fix: hetjax worker",
    ],
    "HTTP server": ["BadInput", "does not speak TLS 1.3", "has the port"],
    "oversized": ["1,073,741,824 bytes, above the limit of 16,384", "fix"],
    "slow": ["ended after"],
    "garbage after joining": ["{'welcome': 'right'}, then the end"],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[JoinedRun]:
    with pytest.MonkeyPatch.context() as patched:
        set_environment(patched)
        patched.setenv("JAX_PLATFORMS", "cpu")
        run = JoinedRun(tmp_path_factory.mktemp("joined"))
        to_do: dict[int, Callable[[], None]] = {
            1: run.call_all,
            2: lambda: os.kill(run.worker_of("left"), signal.SIGKILL),
            3: lambda: run.switch_off("right"),
            4: run.join_again,
            5: run.warn,
        }

        after_steps(patched, lambda done: to_do.pop(done, lambda: None)())
        options = ["--launcher", "join", "--join.address", "127.0.0.1:0"]
        # the run waits for all machines before it starts
        starting = threading.Thread(target=run.join_all)
        starting.start()
        try:
            run.code = main(training(run.run_dir, cache, *options))
            starting.join()
            for machine in run.machines.values():
                machine.wait(PATIENCE_S)
            yield run
        finally:
            for machine in run.machines.values():
                machine.kill()
                machine.wait()


def test_losses_are_those_of_the_runs_own_processes(run: JoinedRun, whole: list[float]):
    assert run.code == 0
    assert losses(run.run_dir) == pytest.approx(whole, rel=1e-5)
    assert trained(run.run_dir) == [*STEPS]


def test_machines_that_go_and_come_are_lost_and_taken_in_like_others(run: JoinedRun):
    found = events(run.run_dir, "recovered")
    told = [(event["step"], event["lost_steps"], event["reason"]) for event in found]
    assert [each[:2] for each in told] == [(2, 0), (3, 0), (4, 0), (5, 0)]
    parts = ("worker 'left'", "right", "right", "right")
    for (_, _, reason), part in zip(told, parts, strict=True):
        assert part in reason
    assert run.output("left").count("joined as") == 1  # only its worker was killed
    assert run.output("left").endswith("the run is over\n")
    assert run.machines["left"].returncode == 0


def test_a_machine_that_is_told_to_go_is_let_go_and_says_so(run: JoinedRun):
    assert run.machines["right"].returncode == 143
    assert "SIGTERM on right" in run.log()


@pytest.mark.parametrize("name", SAID)
def test_who_may_not_join_is_told_why_in_three_parts(name: str, run: JoinedRun):
    for part in SAID[name]:
        assert part in run.came_of[name], run.came_of[name]
    if "BadInput" in SAID[name]:
        assert all(f"{p}: " in run.came_of[name] for p in ("got", "allowed", "fix"))


def test_all_calls_are_judged():
    assert {*SAID} == {*CALLS, *CALLS_AS_THE_MISSING}


def test_a_slow_hello_ends_at_its_limit_however_it_is_dribbled(run: JoinedRun):
    sent = int(run.came_of["slow"].removeprefix("ended after "))
    assert sent < 9_000


def test_tokens_are_in_files_of_the_owner_alone_and_nowhere_else(run: JoinedRun):
    assert len(run.tokens_seen) == 3
    folder = run.run_dir / "join"
    assert not [*folder.glob("*.token")]  # no usable token is left
    for path in (folder, *folder.iterdir()):
        assert path.stat().st_mode & 0o077 == 0
    for path in run.run_dir.parent.rglob("*"):
        if path.is_file() and path.suffix != ".token":
            text = path.read_bytes()
            assert not [t for t in run.tokens_seen if t.encode() in text], path
