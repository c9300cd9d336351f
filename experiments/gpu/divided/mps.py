# SPDX-License-Identifier: Apache-2.0
"""Runs NVIDIA's Multi-Process Service as a daemon that ends with its user.

Clients of the service compute on one card at the same time, each on a share of the
card's multiprocessors. The daemon has its own directories, and no setting of the card
is changed. A small process, the keeper, stands between the daemon and its user. It
starts the daemon, waits for the end of its standard input, which comes however the user
ends, and then stops the daemon. The keeper does not carry a session's mark: a session
that ends all processes of a part must not end the keeper first.

Owns the daemon's life. Does not own what clients compute (`parts/unequal.py`).
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.gpu.time_box import MARK

_CONTROL = "nvidia-cuda-mps-control"
_PID_FILE = f"{_CONTROL}.pid"  # in the directory of pipes, by NVIDIA's documentation
_START_S, _ANSWER_S, _QUIT_S, _END_S = 10.0, 5.0, 5.0, 3.0
_LOOK_S = 0.05
_OF_A_PART = (MARK, "TMPDIR")


class NoService(Exception):
    """The service does not start here; the message says why."""


@contextmanager
def multi_process_service(card: str) -> Iterator[Mapping[str, str]]:
    """Run the service for a card, best given by UUID. Raises NoService if it fails.

    Yields the environment variables of its clients. Each client adds its share of the
    multiprocessors as CUDA_MPS_ACTIVE_THREAD_PERCENTAGE.
    """
    # without the part's mark and temporary folder: the part may end before the keeper
    environment = {n: text for n, text in os.environ.items() if n not in _OF_A_PART}
    keeper = subprocess.Popen(
        [sys.executable, "-m", "experiments.gpu.divided.mps"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment | {"CUDA_VISIBLE_DEVICES": card},
        start_new_session=True,
    )
    assert keeper.stdin is not None and keeper.stdout is not None
    try:
        answer = json.loads(keeper.stdout.readline() or b'{"error": "it ended"}')
        if "error" in answer:
            raise NoService(answer["error"])
        yield answer | {"CUDA_VISIBLE_DEVICES": _seen_by_clients(card)}
    finally:
        keeper.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # the keeper continues without us
            keeper.wait(2 * _ANSWER_S + _QUIT_S + 2 * _END_S)
        keeper.stdout.close()


def _seen_by_clients(card: str) -> str:
    """Return the card's name for clients: its UUID, or its number in the daemon."""
    return card if card.startswith(("GPU-", "MIG-")) else "0"


def _keep() -> None:
    """Run the keeper: print how clients find the daemon, or why there is none."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with TemporaryDirectory(prefix="hetjax-mps-") as folder:
        pipes = {
            "CUDA_MPS_PIPE_DIRECTORY": folder,
            "CUDA_MPS_LOG_DIRECTORY": folder,
        }
        try:
            _start(Path(folder), pipes)
            print(json.dumps(pipes), flush=True)
            sys.stdin.buffer.read()
        except NoService as reason:
            print(json.dumps({"error": str(reason)}), flush=True)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _stop(Path(folder), pipes)


def _start(folder: Path, pipes: Mapping[str, str]) -> None:
    """Start the daemon, which puts itself into the background."""
    said = folder / "start.txt"
    try:
        with said.open("wb") as output:  # no pipe: the daemon would hold it open
            done = subprocess.run(
                [_CONTROL, "-d"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | pipes,
                timeout=_START_S,
            )
    except FileNotFoundError:
        raise NoService(f"{_CONTROL} is not installed") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoService(f"{_CONTROL} -d: {error}") from error
    if done.returncode:
        words = said.read_text(encoding="utf-8", errors="replace").strip()
        raise NoService(f"{_CONTROL} -d ended with {done.returncode}: {words}")
    if _asked("get_server_list", pipes) is None:
        raise NoService(f"{_CONTROL} -d started no daemon that answers")


def _asked(request: str, pipes: Mapping[str, str]) -> str | None:
    """Return the daemon's answer; None if the daemon fails or misses the limit."""
    try:
        done = subprocess.run(
            [_CONTROL],
            input=f"{request}\n",
            capture_output=True,
            text=True,
            env=os.environ | pipes,
            timeout=_ANSWER_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout


def _stop(folder: Path, pipes: Mapping[str, str]) -> None:
    """Ask daemon and servers to quit, and kill those that do not."""
    daemon = _pids((_read(folder / _PID_FILE),))
    if not daemon:
        return
    servers = _pids((_asked("get_server_list", pipes) or "").split())
    _asked("quit", pipes)
    _wait((*servers, *daemon), _QUIT_S)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in (*servers, *daemon):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        _wait((*servers, *daemon), _END_S)


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""


def _pids(words: tuple[str, ...] | list[str]) -> tuple[int, ...]:
    return tuple(int(word) for word in words if word.isdigit())


def _wait(pids: tuple[int, ...], limit_s: float) -> None:
    """Wait until none of these processes runs, or the limit has passed."""
    end_s = time.monotonic() + limit_s
    while any(map(_is_there, pids)) and time.monotonic() < end_s:
        time.sleep(_LOOK_S)


def _is_there(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


if __name__ == "__main__":
    _keep()
