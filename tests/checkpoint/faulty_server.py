# SPDX-License-Identifier: Apache-2.0
"""A server on loopback with faults to inject; subclasses define what it serves.

It calls `fault(method, path, query)` once it has read a request, before the request
takes effect. The result is one of

    None               nothing happens
    503                that status, the request is not executed
    "reset"            the connection is cut, the request is not executed
    "lose reply"       the request takes effect, then the connection is cut
    ("sleep", s)       a delay, then as usual
    ("truncate", n)    downloads: n bytes of the body, then the connection is cut
    ("corrupt", i)     downloads: a flipped bit in byte i, the hashes stay right
"""

import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from hetjax.checkpoint.stores.store import Store

Query = dict[str, str]
Fault = None | int | str | tuple[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request that was answered."""

    method: str
    path: str
    status: int
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class FaultyServer:
    """`fault` may be set at any time, and `log` records the requests.

    Requests with the method `creating` create objects, and their URLs have `scheme`.
    """

    scheme: str
    creating: str
    buckets: dict[str, dict[str, Any]]
    page_size: int

    def __init__(self) -> None:
        self.fault: Callable[[str, str, Query], Fault] = lambda *_: None
        self.log: list[Request] = []
        self.url = ""

    @contextmanager
    def serving(
        self, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
    ) -> Iterator[Self]:
        """Serve on a free port of an address of this machine, stored in `url`."""
        handler = type("Handler", (_Handler,), {"fake": self})
        server = _Server((host, 0), handler)
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://{host}:{server.server_address[1]}"
        serve = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        serve.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()

    def answer(
        self, method: str, path: str, query: Query, headers: Query, body: bytes
    ) -> Reply:
        """Execute a request atomically, as the real server does."""
        raise NotImplementedError

    def store(
        self, prefix: str, *, pause_s: float = 0.001, timeout_s: float = 5.0
    ) -> Store:
        """Return our store of the bucket named `bucket`."""
        raise NotImplementedError

    def path(self, key: str) -> str:
        """Return the path of a request for an object in that bucket."""
        raise NotImplementedError

    def refusal(self, status: int) -> Reply:
        """Return the answer of a server that refuses."""
        raise NotImplementedError

    def is_download(self, method: str, query: Query) -> bool:
        """Return whether the body of the answer is an object's."""
        raise NotImplementedError


class _Server(ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False

    def handle_error(self, request: object, client_address: object) -> None:
        """Report all errors except clients that hung up."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # pyright: ignore


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    fake: "FaultyServer"
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:  # the names are http.server's
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _serve(self) -> None:
        headers = {key.lower(): value for key, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        fault = self.fake.fault(self.command, parts.path, query)
        if isinstance(fault, tuple) and fault[0] == "sleep":
            time.sleep(fault[1])
        if fault == "reset":
            return self._cut()
        if isinstance(fault, int):
            reply = self.fake.refusal(fault)
        else:
            reply = self.fake.answer(self.command, parts.path, query, headers, body)
        if fault == "lose reply":
            return self._cut()
        is_download = self.fake.is_download(self.command, query)
        sent = _damaged(reply.body, fault if is_download else None)
        if self.command == "HEAD":
            sent = b""
        self.fake.log.append(
            Request(
                method=self.command,
                path=unquote(parts.path),
                status=reply.status,
                bytes_in=len(body),
                bytes_out=len(sent),
            )
        )
        self._send(reply, sent)

    def _send(self, reply: Reply, sent: bytes) -> None:
        self.send_response(reply.status)
        for key, value in reply.headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(sent)
        if len(sent) < len(reply.body) and self.command != "HEAD":
            self._cut()

    def _cut(self) -> None:
        self.close_connection = True
        with suppress(OSError):  # the client closed first
            self.connection.shutdown(socket.SHUT_RDWR)


def _damaged(body: bytes, fault: Fault) -> bytes:
    action, where = fault if isinstance(fault, tuple) else ("", 0)
    if action == "truncate":
        return body[: int(where)]
    if action == "corrupt" and body:
        i = int(where) % len(body)
        return body[:i] + bytes([body[i] ^ 1]) + body[i + 1 :]
    return body
