# SPDX-License-Identifier: Apache-2.0
"""Measures the connection to another machine: latency, bandwidth, and its clock.

One machine listens for some minutes, others connect. A request is one byte: `t` asks
for the time (a greeting, then seconds in 8 bytes, big-endian), `d` announces a message
of fixed size, whose arrival one byte confirms. Nothing else is read, kept or trusted.
Owns both ends. Does not own the connections of runs (`hetjax/comm/`).
"""

import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

from hetjax.diagnosis.facts import Peer

LISTEN_S = 600.0
_CONNECT_S = 3.0
_ANSWER_S = 5.0
_PINGS = 8
_MESSAGE_BYTES = 16 << 20
_PIECE_BYTES = 1 << 18
_LOOK_S = 0.25  # between checks whether the socket is closed
_GREETING = b"hetjax"
_TIME = struct.Struct(f"!{len(_GREETING)}sd")
_ASK_TIME, _DATA, _DONE = b"t", b"d", b"k"


def listen(port: int) -> socket.socket:
    """Return a socket that listens on the port at all addresses.

    Raises OSError if the port is taken.
    """
    found = socket.socket(socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(("", port))
        found.listen()
    except OSError:
        found.close()
        raise
    return found


def answer(
    listening: socket.socket,
    limit_s: float = LISTEN_S,
    clock: Callable[[], float] = time.time,
) -> int:
    """Answer one machine after the other for `limit_s`; return how many connected.

    Ends soon after the socket is closed.
    """
    end_s, count = time.monotonic() + limit_s, 0
    listening.settimeout(_LOOK_S)
    while time.monotonic() < end_s and listening.fileno() >= 0:
        with suppress(OSError, EOFError):  # the next caller may be well-behaved
            connected, _ = listening.accept()
            count += 1
            with connected:
                connected.settimeout(_ANSWER_S)
                _serve(connected, clock)
    return count


def _serve(connected: socket.socket, clock: Callable[[], float]) -> None:
    end_s = time.monotonic() + 2 * _ANSWER_S
    while time.monotonic() < end_s:
        asked = connected.recv(1)
        if asked == _ASK_TIME:
            connected.sendall(_TIME.pack(_GREETING, clock()))
        elif asked == _DATA:
            for _ in range(_MESSAGE_BYTES // _PIECE_BYTES):
                _receive(connected, _PIECE_BYTES)
            connected.sendall(_DONE)
        else:
            return


def ask(address: str) -> Peer:
    """Measure the connection to HOST:PORT, where `answer` runs; takes seconds."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), _CONNECT_S) as connected:
            connected.settimeout(_ANSWER_S)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            round_trip_s, ahead_s = min(_ping(connected) for _ in range(_PINGS))
            message_s = _message(connected)
    except TimeoutError:
        return Peer(address=address, error="no answer in time")
    except OSError as error:
        return Peer(address=address, error=error.strerror or str(error))
    except EOFError:
        return Peer(address=address, error="something other than hetjax answers")
    one_way_s = max(message_s - round_trip_s, 1e-9)
    return Peer(
        address=address,
        latency_ms=1e3 * round_trip_s / 2,
        gbit_per_s=8e-9 * _MESSAGE_BYTES / one_way_s,
        clock_ahead_s=ahead_s,
    )


def _ping(connected: socket.socket) -> tuple[float, float]:
    """Return the round-trip seconds, and how far the other clock is ahead."""
    start_s, here_s = time.perf_counter(), time.time()
    connected.sendall(_ASK_TIME)
    greeting, there_s = _TIME.unpack(_receive(connected, _TIME.size))
    round_trip_s = time.perf_counter() - start_s
    if greeting != _GREETING:
        raise EOFError
    return round_trip_s, there_s - here_s - round_trip_s / 2


def _message(connected: socket.socket) -> float:
    start_s = time.perf_counter()
    connected.sendall(_DATA)
    piece = bytes(_PIECE_BYTES)
    for _ in range(_MESSAGE_BYTES // _PIECE_BYTES):
        connected.sendall(piece)
    if _receive(connected, len(_DONE)) != _DONE:
        raise EOFError
    return time.perf_counter() - start_s


def _receive(connected: socket.socket, num_bytes: int) -> bytes:
    """Return `num_bytes` bytes. Raises EOFError if the stream ends before."""
    got = bytearray()
    while len(got) < num_bytes:
        piece = connected.recv(num_bytes - len(got))
        if not piece:
            raise EOFError
        got += piece
    return bytes(got)
