# SPDX-License-Identifier: Apache-2.0
"""Encrypts streams between processes that have certificates.

Owns a TLS 1.3 socket that one thread may read while another writes (the standard
library's may not), and the binding of a handshake to both certificates, which excludes
a man in the middle with a third certificate, even one of the same authority. Does not
own the proof of who is at the other end (`handshake.py`).
"""

import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from hetjax.errors import BadInput
from hetjax.files.reading import Unreadable, opened

_PIECE_BYTES = 256 << 10
_HANDSHAKE_BYTES = 16 << 10  # at a time: the other side is not authenticated
FIRST_BYTE = b"\x16"  # of every TLS connection, and of no greeting of ours


class TlsSide(Protocol):
    """What one side of a TLS stream brings: its context and its fingerprint."""

    def context(self, is_called: bool) -> ssl.SSLContext:
        """Return the context for the side that is called, or the side that calls."""
        ...

    @property
    def fingerprint(self) -> bytes:
        """The fingerprint of its certificate; that of no bytes if it shows none."""
        ...


@dataclass(frozen=True)
class Tls:
    """Paths of this machine's certificate and key, and of its authority's certificate.

    All are PEM files.
    """

    cert: str
    key: str
    ca: str

    def check(self) -> None:
        """Raise BadInput if they cannot be used."""
        try:
            for option in ("cert", "key", "ca"):  # OpenSSL would wait for a FIFO
                with opened(getattr(self, option), what=f"--tls.{option}"):
                    pass
            self.context(True)
        except Unreadable:
            raise
        except (OSError, ValueError) as error:
            raise BadInput(
                got=f"--tls.cert {self.cert}, --tls.key {self.key} and --tls.ca "
                f"{self.ca}, which cannot be used ({error})",
                allowed="a certificate, its key and the certificate of the authority "
                "that signed it, in PEM files on every machine of the run",
                fix="check that they match: openssl verify -CAfile CA CERT",
            ) from error

    def context(self, is_called: bool) -> ssl.SSLContext:
        """Return the context for one side; both sides must show certificates."""
        side = ssl.PROTOCOL_TLS_SERVER if is_called else ssl.PROTOCOL_TLS_CLIENT
        found = ssl.SSLContext(side)
        found.minimum_version = ssl.TLSVersion.TLSv1_3
        found.check_hostname = False  # the run's secret proves who it is
        found.verify_mode = ssl.CERT_REQUIRED
        found.load_cert_chain(self.cert, self.key)
        found.load_verify_locations(self.ca)
        return found

    @property
    def fingerprint(self) -> bytes:
        """The fingerprint of this machine's certificate, the first in its file."""
        return fingerprint_of(Path(self.cert).read_text())


def fingerprint_of(pem: str) -> bytes:
    """Return the SHA-256 of the first certificate in a PEM text; ValueError if none."""
    end = "-----END CERTIFICATE-----"
    first = pem.partition(end)[0]
    first = first[first.index("-----BEGIN CERTIFICATE-----") :]
    return sha256(ssl.PEM_cert_to_DER_cert(first + end)).digest()


class TlsStream:
    """A socket within TLS, with the methods that frames and handshakes use."""

    def __init__(
        self, found: socket.socket, tls: TlsSide, is_called: bool, end_s: float
    ) -> None:
        """Take over the socket and do the handshake.

        Raises OSError, at the monotonic time `end_s` at the latest, however slowly
        bytes arrive.
        """
        self._socket, self._lock = found, threading.Lock()
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = tls.context(is_called)
        self._tls = context.wrap_bio(self._in, self._out, server_side=is_called)
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                found.settimeout(_left_s(end_s))
                self._in.write(self._received(_HANDSHAKE_BYTES))
        self._flush()
        theirs = sha256(self._tls.getpeercert(binary_form=True) or b"").digest()
        both = (theirs, tls.fingerprint) if is_called else (tls.fingerprint, theirs)
        self.binding = b"".join(both)  # caller's certificate, then the called side's

    @property
    def family(self) -> int:
        return self._socket.family

    def setsockopt(self, *what: int) -> None:
        self._socket.setsockopt(*what)

    def settimeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def sendall(self, data: bytes | memoryview) -> None:
        """Send all bytes; like all writes, for one thread at a time."""
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            with self._lock:
                self._tls.write(view[start : start + _PIECE_BYTES])
            self._flush()

    def sendmsg(self, views: Sequence[memoryview]) -> int:
        """Send all views, small ones together."""
        if sum(map(len, views)) <= _PIECE_BYTES:
            views = [memoryview(b"".join(views))]
        for view in views:
            self.sendall(view)
        return sum(map(len, views))

    def recv(self, size: int) -> bytes:
        data = bytearray(size)
        return bytes(data[: self.recv_into(memoryview(data))])

    def recv_into(self, view: memoryview, size: int = 0, flags: int = 0) -> int:
        """Read some bytes, 0 at the end; for one thread at a time."""
        while True:
            with self._lock:
                try:
                    return self._tls.read(len(view), view)  # pyright: ignore
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLZeroReturnError:
                    return 0
            data = self._received()
            with self._lock:
                self._in.write(data)

    def shutdown(self, how: int) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()

    def _received(self, size: int = _PIECE_BYTES) -> bytes:
        data = self._socket.recv(size)
        if not data:
            raise ConnectionError("end of stream")
        return data

    def _flush(self) -> None:
        with self._lock:
            data = self._out.read()
        if data:
            self._socket.sendall(data)


def _left_s(end_s: float) -> float:
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no TLS handshake in time")
    return left_s


Stream = socket.socket | TlsStream
