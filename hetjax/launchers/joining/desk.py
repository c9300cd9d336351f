# SPDX-License-Identifier: Apache-2.0
"""Lets machines join a run, and keeps the connections to them.

Owns who may join as a worker of the cluster: a machine with a good token, the run's
versions and the node's devices, if no other machine is that worker. Strangers learn
only that they are refused; the size and time of their input are limited. Owns also the
request to start a worker, and the machine's reports on it. Does not own the messages
(`hello.py`), tokens (`tokens.py`), nor when a worker is started (`by_joining.py`).
"""

import ipaddress
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hmac import compare_digest

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster, Node
from hetjax.cluster.machines import of_kind
from hetjax.comm.callers import Callers
from hetjax.comm.handshake import read
from hetjax.comm.pinned import OwnCertificate
from hetjax.comm.tls import FIRST_BYTE, TlsStream
from hetjax.errors import BadInput, did_you_mean
from hetjax.launchers.joining import hello as words
from hetjax.launchers.joining.hello import Hello
from hetjax.launchers.joining.tokens import JoinTokens, Token

_HTTP = "HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain\r\n\r\n"


class NotNow(BadInput):
    """A refusal for now: a while later the machine may join."""


@dataclass(kw_only=True)
class JoinedMachine:
    """A machine that has joined as a worker; peers reach it at `address`.

    `ended` is the exit code of the worker that it started last, None until then.
    """

    hello: Hello
    address: str
    stream: TlsStream
    starts: int = 0
    ended: int | None = None
    sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: Mapping[str, object]) -> None:
        """Send a message; a failure ends the connection, which its reader reports."""
        try:
            with self.sending:
                words.send(self.stream, message)
        except OSError:
            with suppress(OSError):
                self.stream.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class _Caller:
    """A caller that has proven that it knows a token."""

    hello: Hello
    token: Token
    stream: TlsStream


class Desk:
    """Listens from construction on; `address` then has the actual port.

    Every host of a node of the present cluster may join once. If `only_cpu`, machines
    need no devices. They must allow the `model_code`, if it is given. `noticed` is
    called for a machine that is about to be taken away, with the seconds left.
    """

    def __init__(
        self,
        address: str,
        own: OwnCertificate,
        tokens: JoinTokens,
        cluster: Cluster,
        *,
        only_cpu: bool,
        model_code: str = "",
    ) -> None:
        self._own, self._tokens = own, tokens
        self._only_cpu, self._model_code = only_cpu, model_code
        self._lock = threading.Lock()
        self._machines: dict[str, JoinedMachine] = {}
        self._nodes: dict[str, Node] = {}
        self.noticed: Callable[[str, float], None] = lambda worker, grace_s: None
        self.follow(cluster)
        self._callers = Callers(address, self._identify, self._let_in)
        self.address = self._callers.address

    def follow(self, cluster: Cluster) -> None:
        """Let machines join as the workers of this cluster; renew their tokens."""
        nodes = {worker: node for node in cluster.nodes for worker in node.workers}
        with self._lock:
            self._nodes = nodes
        self._tokens.renew([*nodes])

    @property
    def machines(self) -> dict[str, JoinedMachine]:
        """The machines that have joined, by worker."""
        with self._lock:
            return dict(self._machines)

    def start(self, machine: JoinedMachine, bootstrap: str) -> None:
        """Make a machine start its worker; it first ends what is left of another."""
        with self._lock:
            node = self._nodes[machine.hello.worker]
            machine.starts, machine.ended = machine.starts + 1, None
        is_cpu = self._only_cpu or canonical_name(node.device) == "cpu"
        machine.send(
            {
                "start": machine.starts,
                "bootstrap": bootstrap,
                "device": "cpu" if is_cpu else canonical_name(node.device),
                "count": node.devices_per_host,
            }
        )

    def close(self, is_done: bool) -> None:
        """Admit no more machines and release all that joined; for good if `is_done`."""
        self._callers.close()
        with self._lock:
            machines = [*self._machines.values()]
        self._tokens.end()
        for machine in machines:
            machine.send({"leave": True, "is_done": is_done})
            with suppress(OSError):
                machine.stream.shutdown(socket.SHUT_WR)

    def _identify(self, found: socket.socket) -> _Caller | None:
        """Return the caller if it knows a token, or None; runs on a separate thread."""
        end_s = time.monotonic() + words.JOIN_S
        found.settimeout(words.JOIN_S)
        if found.recv(1, socket.MSG_PEEK) != FIRST_BYTE:
            found.recv(words.HELLO_BYTES)  # unread input would discard the answer
            found.sendall(f"{_HTTP}{_no_tls(found)}\n".encode())
            return None
        stream = TlsStream(found, self._own, is_called=True, end_s=end_s)
        nonce = words.new_nonce()
        stream.sendall(nonce)
        try:
            said = words.receive_frame(stream, words.HELLO_BYTES, end_s)
        except ValueError as error:
            return self._turn_away(stream, _no_hello(str(error)))
        shown = read(stream, words.PROOF_BYTES, end_s)
        token = self._tokens.proven(
            lambda key: compare_digest(words.proof(key, nonce, said, stream), shown)
        )
        if token is None:  # its hello is not authenticated
            warnings.warn(
                "a caller without a token of this run tried to join it: check that "
                "the machines have the current tokens",
                stacklevel=1,
            )
            return self._turn_away(stream, _no_token())
        try:
            return _Caller(words.read_hello(said), token, stream)
        except BadInput as bad:
            return self._refuse(stream, _where(found), bad)
        except (ValueError, TypeError) as error:
            return self._refuse(stream, _where(found), _no_hello(str(error)))

    def _let_in(self, caller: _Caller, found: socket.socket) -> None:
        """Let a machine join, if it may, and read its messages until it leaves."""
        hello, stream, where = caller.hello, caller.stream, _where(found)
        try:
            self._check(caller)
            machine = self._joined(caller, where)
        except BadInput as bad:
            self._refuse(stream, where, bad)
            return found.close()
        try:
            words.keep_alive(stream)
            machine.send({"welcome": hello.worker})
            while True:
                self._on_message(machine, words.receive(stream))
        except OSError:
            pass
        except (ValueError, TypeError, KeyError) as error:
            warnings.warn(
                f"{where}, which joined as {hello.worker}, sent an unreadable message "
                f"({type(error).__name__}: {error}): it has to join again",
                stacklevel=1,
            )
        finally:
            with self._lock:
                if self._machines.get(hello.worker) is machine:
                    del self._machines[hello.worker]
            found.close()

    def _check(self, caller: _Caller) -> None:
        """Raise BadInput unless this machine may join as this worker."""
        hello, token = caller.hello, caller.token
        with self._lock:
            nodes = self._nodes
        words.check_versions(hello.versions)
        if hello.worker not in nodes:
            raise BadInput(
                got=f"--node {hello.worker}, which is not in the cluster file",
                allowed=", ".join(nodes),
                fix=did_you_mean(hello.worker, list(nodes)),
            )
        if token.worker != hello.worker:
            raise BadInput(
                got=f"--node {hello.worker} with a token of {token.worker}",
                allowed="the node's own token",
                fix=f"give --node {token.worker}, or the token of {hello.worker}",
            )
        if (state := self._tokens.state(token)) != "good":
            raise _stale(token.worker, state)
        if self._model_code and hello.allows != self._model_code:
            but = f" (but {hello.allows})" if hello.allows else ""
            raise BadInput(
                got=f"model {self._model_code}, a function that this machine does not "
                f"allow{but}",
                allowed="functions named here with --allow-model-code",
                fix=f"if you trust that code: --allow-model-code {self._model_code}",
            )
        if hello.address and not _is_number(hello.address):
            raise BadInput(
                got=f"--address {hello.address}",
                allowed="an IPv4 address that other machines reach, such as 10.0.0.2",
                fix="correct it, or leave --address out",
            )
        self._check_devices(nodes[hello.worker], hello)

    def _check_devices(self, node: Node, hello: Hello) -> None:
        kind = canonical_name(node.device)
        own = [*of_kind(kind, hello.devices)]
        if self._only_cpu or kind == "cpu" or len(own) >= node.devices_per_host:
            return
        there = [f"{d.platform} {d.device_kind}" for d in hello.devices]
        raise BadInput(
            got=f"node {node.name!r} wants {node.devices_per_host} x {node.device} on "
            f"this machine; there are {', '.join(there) or 'no accelerators'}",
            allowed="the devices that the cluster file gives the node",
            fix="hetjax devices lists what is there; join as another node, or correct "
            "the cluster file",
        )

    def _joined(self, caller: _Caller, where: str) -> JoinedMachine:
        """Record the machine and use up its token; BadInput if it may not join."""
        hello = caller.hello
        machine = JoinedMachine(
            hello=hello,
            address=hello.address or where.rpartition(":")[0],
            stream=caller.stream,
        )
        with self._lock:
            there = self._machines.get(hello.worker)
            if there is not None:
                raise NotNow(
                    got=f"--node {hello.worker}, but {there.address} has joined as it",
                    allowed="one machine for each node",
                    fix="join as another node; if that machine is gone, wait "
                    "half a minute until the run notices",
                )
            if not self._tokens.use(caller.token):
                raise _stale(hello.worker, "used")
            self._machines[hello.worker] = machine
        return machine

    def _on_message(
        self, machine: JoinedMachine, message: Mapping[str, object]
    ) -> None:
        """Handle what a machine reports of itself, or of the worker that it started."""
        if "notice" in message:
            return self.noticed(machine.hello.worker, float(str(message["notice"])))
        number, code = message["start"], message["ended"]
        if not (isinstance(number, int) and isinstance(code, int)):
            raise ValueError("not whole numbers")
        with self._lock:
            if number == machine.starts:
                machine.ended = code

    def _refuse(self, stream: TlsStream, where: str, bad: BadInput) -> None:
        """Tell a machine that knows a token, and the user, why it may not join."""
        warnings.warn(f"{where} may not join: {bad.got}", stacklevel=1)
        self._turn_away(stream, bad)

    def _turn_away(self, stream: TlsStream, bad: BadInput) -> None:
        with suppress(OSError):
            words.send(stream, words.refusal(bad, isinstance(bad, NotNow)))


def _stale(worker: str, state: str) -> BadInput:
    what = "that was used before" if state == "used" else "that has expired"
    return BadInput(
        got=f"a token of {worker} {what}",
        allowed="an unused token that has not expired (--join.token-s)",
        fix="take the current token from its file; the run printed the path, and "
        "replaces the token at each start, after each join and regularly",
    )


def _no_token() -> BadInput:
    return BadInput(
        got="a token that is wrong, from another start of the run, or long expired",
        allowed="the node's current token, from this start of the run",
        fix="take it from its file; the run printed the path",
    )


def _no_hello(why: str) -> BadInput:
    return BadInput(
        got=f"an unreadable first message ({why})",
        allowed="hetjax worker --join, of the run's release",
        fix="install the same release of hetjax on both machines",
    )


def _no_tls(found: socket.socket) -> BadInput:
    host, port = found.getsockname()[:2]
    return BadInput(
        got="a connection without TLS",
        allowed="hetjax worker --join: machines join a run of hetjax here",
        fix="hetjax worker --help says more",
    )


def _where(found: socket.socket) -> str:
    try:
        host, port = found.getpeername()[:2]
    except OSError:
        return "somebody:0"
    return f"{host}:{port}"


def _is_number(address: str) -> bool:
    with suppress(ValueError):
        return not ipaddress.IPv4Address(address).is_unspecified
    return False
