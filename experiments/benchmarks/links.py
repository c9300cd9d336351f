# SPDX-License-Identifier: Apache-2.0
"""Bytes per second of links between two processes, beside a plain socket copy.

    python -m experiments.benchmarks.links [--rounds 9] [--unix DIRECTORY]

`plain`: one process writes a buffer to a socket with `sendall`, the other reads every
message into a buffer of its own, all made and touched before. `link`: the same bytes as
messages, delivered to the mailbox and handed to JAX as arrays on a CPU device. Both
alternate in one run over loopback (or Unix sockets); medians of rounds, each of as many
messages as make 128 MiB. Prints one JSON object; `share` is link over plain.
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

from hetjax.mesh.links import listen
from hetjax.mesh.peers import Peers
from hetjax.mesh.simulated import simulate_devices

MIB = 1 << 20
SIZES = tuple(n * MIB for n in (1, 4, 16, 64))
ROUND_BYTES = 128 * MIB
_SECRET = bytes(32)  # both ends are ours, on loopback


def _own(name: str, directory: str | None) -> str:
    return f"unix:{directory}/{name}" if directory else "127.0.0.1:0"


def _buffers(found: socket.socket) -> None:
    for size in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        found.setsockopt(socket.SOL_SOCKET, size, 4 * MIB)


def sending(plain: str, link: str, rounds: int, directory: str | None) -> None:
    """The other process: sends what is asked for, as the receiver says go."""
    unix = plain.startswith("unix:")
    sock = socket.socket(socket.AF_UNIX if unix else socket.AF_INET)
    host, _, port = plain.rpartition(":")
    _buffers(sock)
    sock.connect(port if unix else (host, int(port)))
    peers = Peers("a", _own("a", directory), _SECRET)
    peers.connect({"b": link}, 10.0)
    for size in SIZES:
        data = np.ones(size, np.uint8)
        for number in range(rounds):
            assert sock.recv(1)
            for _ in range(ROUND_BYTES // size):
                sock.sendall(data.data)
            peers.mailbox.take("b", (0, 1, size, number, 0, 0))
            for index in range(ROUND_BYTES // size):
                peers.send("b", (0, 0, size, number, index, 0), [data])
    assert sock.recv(1) == b""
    peers.close()


def receiving(rounds: int, directory: str | None) -> list[dict[str, float]]:
    """Measure; this process says when, and what counts is when all is here."""
    listener, plain = listen(_own("plain", directory))
    peers = Peers("b", _own("b", directory), _SECRET)
    command = [sys.executable, "-m", "experiments.benchmarks.links"]
    command += ["--sending", plain, peers.address, "--rounds", str(rounds)]
    command += ["--unix", directory] if directory else []
    child = subprocess.Popen(command)
    sock, _ = listener.accept()
    _buffers(sock)
    peers.connect({"a": ""}, 10.0)
    rows = [_row(sock, peers, size, rounds) for size in SIZES]
    sock.close()
    child.wait(10)
    return rows


def _row(sock: socket.socket, peers: Peers, size: int, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {"plain": [], "link": []}
    buffers = [memoryview(bytearray(size)) for _ in range(ROUND_BYTES // size)]
    for number in range(rounds):
        start_s = time.perf_counter()
        sock.sendall(b"g")
        for into in buffers:
            at = 0
            while at < size:
                at += sock.recv_into(into[at:])
        times["plain"].append(time.perf_counter() - start_s)
        start_s = time.perf_counter()
        peers.send("a", (0, 1, size, number, 0, 0), [np.zeros(1, np.uint8)])
        for index in range(ROUND_BYTES // size):
            data = peers.mailbox.take("a", (0, 0, size, number, index, 0))
            jax.block_until_ready(jax.device_put(data.view(np.float32)))
        times["link"].append(time.perf_counter() - start_s)
    rates = {name: ROUND_BYTES / median(t) for name, t in times.items()}
    return {
        "message_mib": size / MIB,
        "plain_gib_per_s": round(rates["plain"] / 2**30, 3),
        "link_gib_per_s": round(rates["link"] / 2**30, 3),
        "share": round(rates["link"] / rates["plain"], 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--unix", metavar="DIRECTORY")
    parser.add_argument("--sending", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    simulate_devices(1)
    if given.sending:
        plain, link = given.sending
        return sending(plain, link, given.rounds, given.unix)
    print(json.dumps({"rows": receiving(given.rounds, given.unix)}, indent=1))


if __name__ == "__main__":
    main()
