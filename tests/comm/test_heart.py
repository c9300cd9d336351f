# SPDX-License-Identifier: Apache-2.0
"""Heartbeats: a busy process counts as alive, a stopped one as dead."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from experiments.testbed import cpu_quota
from hetjax.comm.heart import heart
from hetjax.comm.peers import PeerLost, Peers

SILENCE_S = 1.0
BUSY_S = 3.0
KEY = (0, 0, 0, 0, 0, 0)


@contextmanager
def busy(busy_s: float) -> Iterator[tuple[Peers, subprocess.Popen[bytes]]]:
    """Yield a process that is busy for this long once it is our peer."""
    secret = secrets.token_bytes(32)
    own = Peers("z", "127.0.0.1:0", secret, SILENCE_S)
    words = [sys.executable, "-m", "tests.comm.busy_process", own.address]
    words += [secret.hex(), str(SILENCE_S), str(busy_s)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(words, env=environment)
    try:
        own.connect({"busy": ""}, 60.0)
        yield own, child
    finally:
        own.close()
        child.kill()
        child.wait()


def lost(peers: Peers) -> tuple[str, float]:
    """Return why the peer is lost, and how long the report took."""
    begin_s = time.monotonic()
    with pytest.raises(PeerLost) as told:
        peers.mailbox.receive("busy", KEY)
    return told.value.reason, time.monotonic() - begin_s


def test_who_lets_no_thread_run_is_not_taken_for_dead():
    with busy(BUSY_S) as (peers, _):
        assert len(peers.mailbox.receive("busy", KEY)) == 24


def children(pid: int) -> list[int]:
    """Wait for the children of a process: a peer starts its heart after it connects."""
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s:
        lists = Path(f"/proc/{pid}/task").glob("*/children")
        if found := [int(word) for file in lists for word in file.read_text().split()]:
            return found
        time.sleep(0.01)
    return []


def test_who_is_starved_by_a_quota_is_not_taken_for_dead():
    controller = cpu_quota.find_controller()
    if controller is None or not os.access(controller.mount, os.W_OK):
        pytest.skip("no writable cgroup `cpu` controller")
    group = cpu_quota.make_group(controller, f"hetjax-heart-{os.getpid()}", 5.0)
    try:
        with busy(BUSY_S) as (peers, child):
            hearts = children(child.pid)
            assert hearts
            for pid in (child.pid, *hearts):  # once its imports are done
                (group / "cgroup.procs").write_text(str(pid))
            assert len(peers.mailbox.receive("busy", KEY)) == 24
    finally:
        cpu_quota.remove_group(group)


def test_who_is_stopped_is_lost_after_the_time_of_silence():
    with busy(0.0) as (peers, child):
        peers.mailbox.receive("busy", KEY)
        child.send_signal(signal.SIGSTOP)
        reason, took_s = lost(peers)
        assert reason == "gave no sign of life"
        assert took_s < SILENCE_S + 0.5


def test_who_is_stopped_for_less_than_that_is_not_lost():
    with busy(0.0) as (peers, child):
        peers.mailbox.receive("busy", KEY)
        for _ in range(4):
            child.send_signal(signal.SIGSTOP)
            time.sleep(0.4 * SILENCE_S)
            child.send_signal(signal.SIGCONT)
            time.sleep(0.4 * SILENCE_S)
        peers.mailbox.check()


def test_who_is_killed_is_lost_at_once():
    with busy(60.0) as (peers, child):
        child.kill()
        reason, took_s = lost(peers)
        assert reason.startswith("closed the connection") and took_s < 0.5


def test_a_heart_ends_with_its_process_and_not_before():
    code = (
        "import time; from hetjax.comm.heart import heart\n"
        "print(heart()._child.pid, flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment
    )
    assert parent.stdout is not None
    stat = Path(f"/proc/{int(parent.stdout.readline())}/stat")
    time.sleep(0.2)
    assert stat.exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end_s = time.monotonic() + 5
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_heart_beats_on_when_all_of_a_group_are_told_to_end():
    """As scancel and systemd do: the process saves, and needs its heart for that."""
    with busy(BUSY_S) as (peers, _):
        heart()._child.terminate()
        assert len(peers.mailbox.receive("busy", KEY)) == 24
        assert heart()._child.poll() is None


def test_a_heart_that_was_killed_is_told_of_and_followed_by_another():
    with busy(0.0) as (peers, _):
        peers.mailbox.receive("busy", KEY)
        earlier = heart()
        earlier._child.kill()
        assert lost(peers)[0].startswith("cannot be heard")
        earlier._child.wait()
        assert heart() is not earlier
