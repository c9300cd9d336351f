# SPDX-License-Identifier: Apache-2.0
"""Measures bytes per second of links between two processes, beside plain sockets.

    python -m experiments.benchmarks.links [--rounds 9] [--unix DIRECTORY]

`plain`: one process writes a buffer to a socket with `sendall`, the other reads each
message into its own buffer; all buffers are made and touched before. `plain_arrays`:
the same, but each message is read into fresh memory, which JAX takes over as an array
on a CPU device. `link`: the same bytes as messages, delivered to the mailbox and handed
to JAX in the same way, as `wire.py` does it. `coded`: a link whose frames carry codes,
as between machines. All alternate in one run over loopback (or Unix sockets). Figures
are medians of rounds, each with enough messages for 128 MiB. Prints one JSON object;
`share` is link over plain, `share_of_arrays` link over plain_arrays, `share_coded`
coded over link.
"""

import argparse
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median

import jax
import numpy as np

from hetjax.comm.addresses import listen
from hetjax.comm.peers import Peers
from hetjax.comm.wire import laid_out
from hetjax.mesh.process_setup import simulate_devices

MIB = 1 << 20
SIZES = tuple(n * MIB for n in (1, 4, 16, 64))
ROUND_BYTES = 128 * MIB
_SECRET = bytes(32)  # both ends are ours, on loopback


def _own(name: str, directory: str | None) -> str:
    return f"unix:{directory}/{name}" if directory else "127.0.0.1:0"


def _buffers(found: socket.socket) -> None:
    for size in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        found.setsockopt(socket.SOL_SOCKET, size, 4 * MIB)


def sending(
    plain: str, links: Sequence[str], rounds: int, directory: str | None
) -> None:
    """Be the other process: send on each request of the receiver."""
    unix = plain.startswith("unix:")
    sock = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
    host, _, port = plain.rpartition(":")
    _buffers(sock)
    sock.connect(port if unix else (host, int(port)))
    both = [_peers("a", directory, coded) for coded in (False, True)]
    for peers, address in zip(both, links, strict=True):
        peers.connect({"b": address}, 10.0)
    for size in SIZES:
        data = np.ones(size, np.uint8)
        for number in range(rounds):
            for _ in ("plain", "plain_arrays"):
                assert sock.recv(1)
                for _ in range(ROUND_BYTES // size):
                    sock.sendall(data.data)
            for peers in both:
                peers.mailbox.receive("b", (0, 1, size, number, 0, 0))
                for index in range(ROUND_BYTES // size):
                    peers.send("b", (0, 0, size, number, index, 0), [data])
    assert sock.recv(1) == b""
    for peers in both:
        peers.close()


def _peers(name: str, directory: str | None, coded: bool) -> Peers:
    own = _own(f"{name}-coded" if coded else name, directory)
    return Peers(name, own, _SECRET, coded=coded)


def receiving(rounds: int, directory: str | None) -> list[dict[str, float]]:
    """Measure. This process requests each round and times it until all has arrived."""
    listener, plain = listen(_own("plain", directory))
    both = [_peers("b", directory, coded) for coded in (False, True)]
    command = [sys.executable, "-m", "experiments.benchmarks.links"]
    command += ["--sending", plain, *(peers.address for peers in both)]
    command += ["--rounds", str(rounds)]
    command += ["--unix", directory] if directory else []
    child = subprocess.Popen(command)
    sock, _ = listener.accept()
    _buffers(sock)
    for peers in both:
        peers.connect({"a": ""}, 10.0)
    rows = [_row(sock, both, size, rounds) for size in SIZES]
    sock.close()
    child.wait(10)
    return rows


def _row(
    sock: socket.socket, both: Sequence[Peers], size: int, rounds: int
) -> dict[str, float]:
    link, coded = both
    buffers = [memoryview(bytearray(size)) for _ in range(ROUND_BYTES // size)]
    names = ("plain", "plain_arrays", "link", "coded")
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name, receive in {
            "plain": lambda: _plain(sock, buffers),
            "plain_arrays": lambda: _plain_arrays(sock, size),
            "link": lambda number=number: _link(link, size, number),
            "coded": lambda number=number: _link(coded, size, number),
        }.items():
            start_s = time.perf_counter()
            receive()
            times[name].append(time.perf_counter() - start_s)
    rates = {name: ROUND_BYTES / median(t) for name, t in times.items()}
    shown = {f"{name}_gib_per_s": round(r / 2**30, 3) for name, r in rates.items()}
    return {
        "message_mib": size / MIB,
        **shown,
        "share": round(rates["link"] / rates["plain"], 3),
        "share_of_arrays": round(rates["link"] / rates["plain_arrays"], 3),
        "share_coded": round(rates["coded"] / rates["link"], 3),
    }


def _plain(sock: socket.socket, buffers: Sequence[memoryview]) -> None:
    sock.sendall(b"g")
    for into in buffers:
        _fill(sock, into)


def _plain_arrays(sock: socket.socket, size: int) -> None:
    sock.sendall(b"g")
    for _ in range(ROUND_BYTES // size):
        raw = np.empty(size + 64, np.uint8)
        start = -raw.ctypes.data % 64  # so aligned, JAX takes it over without a copy
        data = raw[start : start + size]
        _fill(sock, data.data)
        _hand_over(data)


def _link(peers: Peers, size: int, number: int) -> None:
    peers.send("a", (0, 1, size, number, 0, 0), [np.zeros(1, np.uint8)])
    for index in range(ROUND_BYTES // size):
        _hand_over(peers.mailbox.receive("a", (0, 0, size, number, index, 0)))


def _fill(sock: socket.socket, into: memoryview) -> None:
    at = 0
    while at < len(into):
        at += sock.recv_into(into[at:])


def _hand_over(data: np.ndarray) -> None:
    """Hand the bytes to JAX as `Wire.receive` does."""
    x = data.view(np.float32)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    expected = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device)
    jax.block_until_ready(laid_out({(0, len(x)): x}, expected))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--unix", metavar="DIRECTORY")
    parser.add_argument("--sending", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    simulate_devices(1)
    if given.sending:
        plain, *links = given.sending
        return sending(plain, links, given.rounds, given.unix)
    print(json.dumps({"rows": receiving(given.rounds, given.unix)}, indent=1))


if __name__ == "__main__":
    main()
