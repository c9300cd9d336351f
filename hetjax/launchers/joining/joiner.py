# SPDX-License-Identifier: Apache-2.0
"""Joins this machine to a run, and starts the run's worker whenever requested.

The worker is a separate process. Its standard input is the same as that of a worker
that the run starts itself. Owns this process, its worker's end, and that only code that
is allowed here is called. Does not own the messages (`hello.py`), nor what a worker
does (`training/worker.py`).
"""

import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NoReturn

from hetjax.cluster.local_devices import LocalDevice
from hetjax.cluster.machines import of_kind
from hetjax.comm.handshake import read
from hetjax.comm.pinned import OtherCertificate, dial_pinned, spelled
from hetjax.comm.tls import TlsStream
from hetjax.errors import BadInput, RunFailed
from hetjax.launchers.device_probe import accelerators_here
from hetjax.launchers.isolation import memory_share, visible_devices
from hetjax.launchers.joining import hello as words
from hetjax.launchers.joining.hello import Hello
from hetjax.mesh.process_setup import malloc_environment
from hetjax.runtime.worker.bootstrap import read_bootstrap

_WORKER = "hetjax.training.worker"  # in a room above: by name
_END_S = 30.0  # until a worker whose run is over is killed
_GRACE_S = 30.0  # after a SIGTERM: the default of Kubernetes
_INTERRUPTED, _TERMINATED = 1, 143  # exit codes


@dataclass(frozen=True, kw_only=True, slots=True)
class Joining:
    """How to join a run: where it waits, as which worker, and the credentials.

    `fingerprint` identifies the run, `token` admits this machine. Only the function
    `allows` may be called as a model (empty: none). Other machines reach this one at
    `own_address` (empty: the address that it calls from).
    """

    address: str
    worker: str
    fingerprint: bytes
    token: bytes
    own_address: str = ""
    allows: str = ""


def join(joining: Joining) -> None:
    """Join, and work until the run is over.

    Raises BadInput if the run refuses this machine. Raises RunFailed if the run cannot
    be reached, is lost, or cannot take the machine for now: a retry may succeed.
    """
    here = accelerators_here(os.environ)
    stream = _dialled(joining)
    try:
        _introduce(stream, joining, here)
        words.keep_alive(stream)
        print(f"joined as {joining.worker}: waiting for the run", flush=True)
        _Joined(stream, joining, here).work()
    finally:
        stream.close()


def _dialled(joining: Joining) -> TlsStream:
    """Connect to the run; raise BadInput if it shows another certificate."""
    end_s = time.monotonic() + words.JOIN_S
    try:
        return dial_pinned(joining.address, joining.fingerprint, end_s)
    except OtherCertificate as other:
        raise BadInput(
            got=f"{joining.address} shows the certificate {other.found}",
            allowed=f"the run's own, {spelled(joining.fingerprint)}; nothing was sent",
            fix="check that address and fingerprint are those that the run printed; if "
            "they are, somebody intercepts the connection",
        ) from other
    except ssl.SSLError as error:
        raise BadInput(
            got=f"{joining.address} does not speak TLS 1.3 ({error.reason or error})",
            allowed="the address at which a run waits for machines",
            fix="check that --join has the port that the run printed",
        ) from error
    except OSError as error:
        _unreachable(joining, error)


def _introduce(stream: TlsStream, joining: Joining, here: list[LocalDevice]) -> None:
    """Identify this machine to the run; BadInput if it is refused."""
    end_s = time.monotonic() + words.JOIN_S
    hello = Hello(
        worker=joining.worker,
        versions=words.versions_here(),
        devices=tuple(here),
        address=joining.own_address,
        allows=joining.allows,
    ).text()
    try:
        nonce = read(stream, words.NONCE_BYTES, end_s)
        words.send_frame(stream, hello)
        stream.sendall(words.proof(joining.token, nonce, hello, stream))
        answer = words.receive(stream, end_s)
    except (OSError, ValueError) as error:
        _unreachable(joining, error)
    if "refused" in answer:
        failure = RunFailed if answer.get("for_now") else BadInput
        raise failure(**answer["refused"])


def _unreachable(joining: Joining, error: Exception) -> NoReturn:
    why = getattr(error, "strerror", None) or error
    raise RunFailed(
        got=f"no answer from a run at {joining.address} ({why})",
        allowed="a run that was started with --launcher join and this --join.address",
        fix="start it, and check that firewalls let this machine reach it",
    ) from error


def _stopped() -> RunFailed:
    return RunFailed(
        got="a run that has stopped before its last step",
        allowed="a run that continues; the state of this one is in its checkpoints",
        fix="once the run is started again, join with its new token",
    )


class _Joined:
    """A machine that has joined; it reads the run's messages on the main thread."""

    def __init__(
        self, stream: TlsStream, joining: Joining, here: list[LocalDevice]
    ) -> None:
        self._stream, self._joining, self._here = stream, joining, here
        self._child: subprocess.Popen[str] | None = None
        self._is_leaving = False
        self._sending = threading.Lock()

    def work(self) -> None:
        """Follow the run's messages until it is over; RunFailed if the run is lost."""
        previous = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, self._terminate),
            signal.SIGINT: signal.signal(signal.SIGINT, self._interrupt),
        }
        try:
            while "leave" not in (message := words.receive(self._stream)):
                self._start(message)
            self._end_child(_END_S)
            if not message["is_done"]:
                raise _stopped()
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._end_child(_END_S)
            raise RunFailed(
                got=f"the connection to the run at {self._joining.address} is lost "
                f"({error})",
                allowed="a connection that lasts as long as the run",
                fix="join again with the current token",
            ) from error
        finally:
            self._end_child(0.0)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(self, message: Mapping[str, Any]) -> None:
        """Start the worker with only its devices, and its bootstrap as input."""
        self._end_child(0.0)
        bootstrap = read_bootstrap(message["bootstrap"])
        if bootstrap.worker != self._joining.worker:
            raise ValueError(f"a bootstrap for another worker, {bootstrap.worker}")
        bootstrap = replace(bootstrap, only_code=self._joining.allows)
        self._child = child = subprocess.Popen(
            [sys.executable, "-m", _WORKER],
            stdin=subprocess.PIPE,
            env={**os.environ, **malloc_environment(), **self._variables(message)},
            text=True,
            start_new_session=True,  # a terminal's Ctrl-C reaches only this process
        )
        assert child.stdin is not None
        with suppress(BrokenPipeError):
            child.stdin.write(f"{bootstrap.text()}\n")
            child.stdin.close()
        threading.Thread(
            target=self._tell_end, args=(child, message["start"]), daemon=True
        ).start()

    def _variables(self, message: Mapping[str, Any]) -> dict[str, str]:
        if message["device"] == "cpu":
            return visible_devices((), ())
        own = [*of_kind(message["device"], self._here)][: message["count"]]
        is_tpu = bool(own) and own[0].platform == "tpu"
        shown = visible_devices(own, self._here)
        return shown if is_tpu else shown | memory_share(os.environ)

    def _tell_end(self, child: subprocess.Popen[str], number: int) -> None:
        code = child.wait()
        # as shells do: 128 plus the signal's number
        code = 128 - code if code < 0 else code
        self._say({"start": number, "ended": code})
        if self._is_leaving:
            os._exit(_TERMINATED)

    def _say(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError), self._sending:
            words.send(self._stream, message)

    def _end_child(self, patience_s: float) -> None:
        """Wait up to `patience_s` for the worker to end by itself, then kill it."""
        if self._child is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(patience_s)
        self._child.kill()
        self._child.wait()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """End at once, and the worker, too: the run counts that as a loss."""
        if self._child is not None:
            self._child.kill()
        os.write(2, b"\nhetjax: interrupted; the run continues without this machine\n")
        os._exit(_INTERRUPTED)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        """Tell the run, which lets the worker leave; if there is none, end at once."""
        if self._child is None or self._child.poll() is not None:
            os._exit(_TERMINATED)
        if not self._is_leaving:
            self._is_leaving = True
            # on a thread: the interrupted code may hold the stream
            notice = ({"notice": _GRACE_S},)
            threading.Thread(target=self._say, args=notice, daemon=True).start()
