# SPDX-License-Identifier: Apache-2.0
"""Measures bytes per second of each step on a gradient's path between two processes.

    python -m experiments.benchmarks.host_path [--rounds 15] [--mib 64] [--platform cpu]

A group of `--mib` takes the path of `hetjax/comm/reduction.py`, step by step:

* `to_host`: rows on the device, as the host reads them (on a CPU this copies nothing);
* `socket`: from the mailbox of another process into our own;
* `sum`: our rows and the received ones, by all cores; `sum_bfloat16` and `round` are
  what `--gradient-wire bfloat16` adds and sends;
* `to_device`: the sum, back on the device.

The references are `copy`: the bytes that a sum reads (twice the group's), copied by as
many threads; `copy_alone`: by one thread; `loopback`: the group's bytes over a bare
socket. All alternate, in memory that was touched before; medians of rounds. Prints one
JSON object: ms, GiB/s of the group's fp32 bytes, ms of all our cores together
(`cpu_ms`, independent of other programs), and shares, each the median over rounds.
"""

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import jax
import ml_dtypes
import numpy as np

from hetjax.comm.connections import Key
from hetjax.comm.host_sum import added, dealt_out, num_cores, rounded
from hetjax.comm.peers import Peers
from hetjax.comm.reduction import from_host, to_host
from hetjax.mesh.process_setup import keep_freed_memory, malloc_environment

MIB = 1 << 20
_SECRET = bytes(32)  # both ends are ours, on loopback
_BF16 = np.dtype(ml_dtypes.bfloat16)
_COMMAND = "python -m experiments.benchmarks.host_path"
_BARE, _LINK, _END = b"bl."  # requests to the other process


def key(number: int) -> Key:
    return (0, 0, 0, number, 0, 0)


def sending(control: str, link: str, size: int) -> None:
    """Be the other process: send what `control` requests, one byte per request."""
    host, _, port = control.rpartition(":")
    asked = socket.create_connection((host, int(port)))
    peers = Peers("a", "127.0.0.1:0", _SECRET)
    peers.connect({"b": link}, 30.0)
    data, number = np.ones(size, np.uint8), 0
    while (word := asked.recv(1)) and word[0] != _END:
        if word[0] == _BARE:
            asked.sendall(data.data)
        else:
            peers.send("b", key(number), [data])
            number += 1
    peers.close()


def steps(
    asked: socket.socket, peers: Peers, size: int
) -> dict[str, Callable[[int], object]]:
    """Return a function of the round's number for each step."""
    rng = np.random.default_rng(0)
    ours, came = (rng.standard_normal(size // 4).astype(np.float32) for _ in range(2))
    narrow = ours.astype(_BF16), came.astype(_BF16)
    rows = (jax.device_put(ours[None]),)
    room, (twice, out) = np.zeros(size, np.uint8), np.ones((2, size // 2), np.float32)

    def bare(_: int) -> None:
        asked.send(bytes([_BARE]))
        at = 0
        while at < size:
            at += asked.recv_into(room.data[at:])

    def link(number: int) -> None:
        asked.send(bytes([_LINK]))
        peers.mailbox.receive("a", key(number))

    def copy(begin: int, end: int) -> None:
        np.copyto(out[begin:end], twice[begin:end])

    return {
        "to_host": lambda _: to_host(rows, [0]),
        "loopback": bare,
        "socket": link,
        "copy_alone": lambda _: copy(0, out.size),
        "copy": lambda _: dealt_out(out.size, copy),
        "sum": lambda _: added([ours, came], came),
        "sum_one_thread": lambda _: np.add(ours, came, out=came),
        "sum_bfloat16": lambda _: added(narrow),
        "round": lambda _: rounded(ours, _BF16),
        "to_device": lambda _: jax.block_until_ready(from_host(came[None], rows)),
    }


def measured(rounds: int, size: int) -> dict[str, Any]:
    """Start the other process, and time all steps in turn."""
    listener = socket.create_server(("127.0.0.1", 0))
    peers = Peers("b", "127.0.0.1:0", _SECRET)
    control = "{}:{}".format(*listener.getsockname())
    command = [sys.executable, "-m", "experiments.benchmarks.host_path"]
    command += ["--sending", control, peers.address, "--mib", str(size // MIB)]
    child = subprocess.Popen(command, env=os.environ | malloc_environment())
    asked, _ = listener.accept()
    peers.connect({"a": ""}, 30.0)
    times: dict[str, list[tuple[float, float]]] = {}
    made = steps(asked, peers, size)
    for number in range(rounds + 1):  # the first of each touches memory
        for name, step in made.items():
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            step(number)
            took = time.perf_counter() - start_s, time.process_time() - start_cpu_s
            times.setdefault(name, []).append(took)
    asked.send(bytes([_END]))
    child.wait(30)
    peers.close()
    walls = {name: [wall for wall, _ in took[1:]] for name, took in times.items()}
    cpus = {name: [cpu for _, cpu in took[1:]] for name, took in times.items()}
    return {
        "mib": size // MIB,
        "rounds": rounds,
        "ms": {name: round(1e3 * median(t), 2) for name, t in walls.items()},
        "cpu_ms": {name: round(1e3 * median(t), 2) for name, t in cpus.items()},
        "gib_per_s": {n: round(size / median(t) / 2**30, 2) for n, t in walls.items()},
        "sum_of_copy": share(walls, "sum", "copy"),
        "sum_of_copy_by_cpu": share(cpus, "sum", "copy"),
        "sum_bfloat16_of_copy": share(walls, "sum_bfloat16", "copy"),
        "socket_of_loopback": share(walls, "socket", "loopback"),
        "to_device_of_copy_alone": share(walls, "to_device", "copy_alone"),
    }


def share(times: Mapping[str, Sequence[float]], name: str, of: str) -> float:
    """Return how fast `name` is, as a share of the speed of `of`."""
    pairs = zip(times[name], times[of], strict=True)
    return round(median(other / own for own, other in pairs), 3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--platform", default=None)
    parser.add_argument(
        "--sending", nargs=2, metavar=("CONTROL", "LINK"), help=argparse.SUPPRESS
    )
    asked = parser.parse_args()
    if asked.sending:
        control, link = asked.sending
        sending(control, link, asked.mib * MIB)
        return
    if asked.platform:
        jax.config.update("jax_platforms", asked.platform)
    keep_freed_memory()
    about = {
        "command": " ".join([_COMMAND, *sys.argv[1:]]),
        "machine": f"{num_cores()} CPU cores ({platform.machine()}), load "
        f"{os.getloadavg()[0]:.0f}; {jax.devices()[0]}, Python "
        f"{platform.python_version()}, JAX {jax.__version__}",
    }
    found = measured(asked.rounds, asked.mib * MIB)
    print(json.dumps(about | found, indent=1))


if __name__ == "__main__":
    main()
