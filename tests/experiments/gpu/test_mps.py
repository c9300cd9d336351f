# SPDX-License-Identifier: Apache-2.0
"""The MPS daemon lives as long as its user, however that ends; the daemon is a fake."""

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.gpu.divided.mps import NoService, multi_process_service
from experiments.gpu.time_box import MARK, run_boxed

# like NVIDIA's: -d starts a daemon in the background, other starts read a request
CONTROL = """#!/bin/sh
pid_file="$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
if [ "$1" = -d ]; then
    if [ -n "$FAKE_FAILS" ]; then echo "no card here"; exit 1; fi
    sleep 600 > /dev/null 2>&1 &
    echo $! > "$pid_file"
    echo $! > "$FAKE_DAEMON"
    exit 0
fi
read request
[ -f "$pid_file" ] || exit 1
echo "$request" >> "$FAKE_REQUESTS"
[ "$request" != quit ] || [ -n "$FAKE_DEAF" ] || kill "$(cat "$pid_file")"
"""
USER = """
import time
from experiments.gpu.divided.mps import multi_process_service
with multi_process_service("GPU-1a2b") as variables:
    print(variables["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
    time.sleep(600)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the fake daemon writes its pid and its requests."""
    control = tmp_path / "bin" / "nvidia-cuda-mps-control"
    control.parent.mkdir()
    control.write_text(CONTROL)
    control.chmod(control.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{control.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("FAKE_DAEMON", str(tmp_path / "daemon"))
    monkeypatch.setenv("FAKE_REQUESTS", str(tmp_path / "requests"))
    return tmp_path


def daemon(fake: Path) -> int:
    return int((fake / "daemon").read_text())


def is_there(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def wait_until(is_so: Callable[[], bool], patience_s: float = 60.0) -> None:
    end_s = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def requests(fake: Path) -> list[str]:
    return (fake / "requests").read_text().split()


def test_the_service_lasts_as_long_as_the_block(
    fake: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(MARK, "of a session")
    with multi_process_service("GPU-1a2b") as variables:
        folder = Path(variables["CUDA_MPS_PIPE_DIRECTORY"])
        assert variables["CUDA_MPS_LOG_DIRECTORY"] and folder.is_dir()
        assert variables["CUDA_VISIBLE_DEVICES"] == "GPU-1a2b"
        environment = Path(f"/proc/{daemon(fake)}/environ").read_bytes().split(b"\0")
        assert b"CUDA_VISIBLE_DEVICES=GPU-1a2b" in environment
        assert not any(entry.startswith(MARK.encode()) for entry in environment)
    assert not is_there(daemon(fake)) and not folder.exists()
    assert requests(fake)[-1] == "quit"


def test_clients_call_the_one_card_that_the_daemon_sees_0(fake: Path):
    with multi_process_service("3") as variables:
        assert variables["CUDA_VISIBLE_DEVICES"] == "0"
        environment = Path(f"/proc/{daemon(fake)}/environ").read_bytes().split(b"\0")
        assert b"CUDA_VISIBLE_DEVICES=3" in environment


def test_an_error_inside_the_block_ends_the_service(fake: Path):
    with pytest.raises(KeyError), multi_process_service("0"):
        raise KeyError
    assert not is_there(daemon(fake))


@pytest.mark.nightly
def test_a_daemon_that_does_not_quit_is_ended(
    fake: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_DEAF", "1")
    with multi_process_service("0"):
        assert is_there(daemon(fake))
    assert "quit" in requests(fake) and not is_there(daemon(fake))


def test_a_daemon_that_does_not_start_gives_its_reason(
    fake: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_FAILS", "1")
    with pytest.raises(NoService, match="no card here"), multi_process_service("0"):
        pass
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    with pytest.raises(NoService, match="not installed"), multi_process_service("0"):
        pass


def test_a_user_that_is_killed_leaves_no_daemon(fake: Path):
    user = subprocess.Popen([sys.executable, "-c", USER], stdout=subprocess.PIPE)
    assert user.stdout is not None
    folder = Path(user.stdout.readline().decode().strip())
    assert is_there(daemon(fake)) and folder.is_dir()
    user.send_signal(signal.SIGKILL)
    user.wait()
    wait_until(lambda: not is_there(daemon(fake)) and not folder.exists())
    assert requests(fake)[-1] == "quit"


@pytest.mark.nightly
def test_a_session_that_ends_a_part_leaves_no_daemon_and_lets_it_quit(fake: Path):
    command = [sys.executable, "-c", USER]
    assert run_boxed(command, 8.0, fake / "log.txt") is None  # its time is up
    wait_until(lambda: not is_there(daemon(fake)))
    assert requests(fake)[-1] == "quit"
    assert MARK not in os.environ
