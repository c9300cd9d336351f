# SPDX-License-Identifier: Apache-2.0
"""Sends arrays to a device of another process and back, by both transports.

    python -m experiments.gpu.processes.two_processes --platform cpu --sizes 65536

The transports are those of a run (`hetjax/comm/`): sockets, through the host's memory,
then `jax.experimental.transfer`. This process starts another one, which sends back
whatever it receives. This process prints a JSON line for each transport and size: half
the seconds of a round trip, and whether the returned array equals the sent one. Owns
both ends. Does not own the expected rates (`parts/transports.py`).
"""

import argparse
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from itertools import product
from statistics import median

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from experiments.gpu.setting import share_card
from experiments.gpu.timing.timed_programs import normal
from hetjax.comm.peers import Peers
from hetjax.comm.pull import PullServer, TransferTransport
from hetjax.comm.transport import Tag, Transport
from hetjax.comm.wire import HostWorkPool, SocketTransport
from hetjax.mesh.process_setup import simulate_devices

TRANSPORTS = ("sockets", "transfer")
_HOST = "127.0.0.1"
_STAGES = {"east": 0, "west": 1}  # the measuring process has the first
_ROUNDS = 6  # the first compiles and connects
_NUM_THREADS = 4
_CONNECT_S = 30.0
_WIDTH = 1024


class _End:
    """One of the two processes, and its connection to the other."""

    def __init__(self, own: str, device: jax.Device) -> None:
        self.own, self.device = own, device
        (self.other,) = _STAGES.keys() - {own}
        self._by = ""

    def listen(self, secret: bytes) -> str:
        self._secret = secret
        self.peers = Peers(self.own, f"{_HOST}:0", secret)
        return self.peers.address

    def connect(self, address: str) -> None:
        self.peers.connect({self.other: address}, _CONNECT_S)
        self._pool = HostWorkPool(self.peers, _NUM_THREADS)

    def go_on_by(self, transport: str) -> None:
        """Send and receive by this transport from now on."""
        if transport != self._by:
            self._by, self._transport = transport, self._made(transport)

    def _made(self, transport: str) -> Transport:
        if transport == "sockets":
            ranks = {(0, stage): ((node,),) for node, stage in _STAGES.items()}
            return SocketTransport(self.peers, self._pool, ranks)
        nodes = {(0, stage): node for node, stage in _STAGES.items()}
        server = PullServer(_HOST, self._secret)
        degrees = dict.fromkeys(nodes, 1)
        return TransferTransport(self.peers, self._pool, nodes, server, degrees)

    def send(self, turn: int, number: int, x: jax.Array) -> None:
        self._transport.send(_tag(turn, number, self.other), x)

    def receive(self, turn: int, number: int, num_bytes: int) -> jax.Array:
        """Wait for the array of that size; PeerLost if the other process is lost."""
        tag, version = _tag(turn, number, self.own), self.peers.mailbox.version
        while not self._transport.arrived(tag):
            version = self.peers.mailbox.wait(version)
        expected = jax.ShapeDtypeStruct(
            _shape(num_bytes), jnp.float32, sharding=SingleDeviceSharding(self.device)
        )
        return jax.block_until_ready(self._transport.receive(tag, expected))


def _tag(turn: int, number: int, receiver: str) -> Tag:
    kind = "F" if receiver == "west" else "B"
    return Tag(0, turn, kind, 0, _STAGES[receiver], number)


def _shape(num_bytes: int) -> tuple[int, int]:
    return num_bytes // 4 // _WIDTH, _WIDTH


def measuring(options: Sequence[str]) -> None:
    """Start the other process, send it arrays, and print their round-trip times."""
    command = [
        sys.executable,
        "-m",
        "experiments.gpu.processes.two_processes",
        *options,
    ]
    child = subprocess.Popen(
        [*command, "--answering"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    end, secret = _End("east", _device(options)), secrets.token_bytes(32)
    child.stdin.write(f"{secret.hex()} {end.listen(secret)}\n")
    child.stdin.flush()
    end.connect(child.stdout.readline().strip())
    for turn, (transport, num_bytes) in enumerate(_turns(options)):
        end.go_on_by(transport)
        x = normal(end.device, _shape(num_bytes), "float32")
        times_s, are_equal = list[float](), True
        for number in range(_ROUNDS):
            start_s = time.perf_counter()
            end.send(turn, number, x)
            found = end.receive(turn, number, num_bytes)
            times_s.append((time.perf_counter() - start_s) / 2)
            are_equal &= bool(jnp.array_equal(x, found))
        told = {"transport": transport, "num_bytes": num_bytes}
        told |= {"seconds": median(times_s[1:]), "are_equal": are_equal}
        print(json.dumps(told), flush=True)
    child.stdin.close()  # which ends it
    child.wait()
    os._exit(0)  # without waiting for threads that wait for the ended peer


def answering(options: Sequence[str]) -> None:
    """Send back whatever arrives."""
    end = _End("west", _device(options))  # JAX starts in both processes at once
    secret, address = sys.stdin.readline().split()
    threading.Thread(target=_end_with_other, daemon=True).start()
    print(end.listen(bytes.fromhex(secret)), flush=True)
    end.connect(address)
    for turn, (transport, num_bytes) in enumerate(_turns(options)):
        end.go_on_by(transport)
        for number in range(_ROUNDS):
            end.send(turn, number, end.receive(turn, number, num_bytes))
    threading.Event().wait()  # the last arrays may not have been pulled yet


def _end_with_other() -> None:
    sys.stdin.read()
    os._exit(0)


def _device(options: Sequence[str]) -> jax.Device:
    platform = parser().parse_args(options).platform
    share_card()
    if platform == "cpu":
        simulate_devices(1)
    return jax.local_devices(backend=platform)[0]


def _turns(options: Sequence[str]) -> list[tuple[str, int]]:
    return [*product(TRANSPORTS, parser().parse_args(options).sizes)]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--platform", default="cuda")
    made.add_argument("--sizes", type=int, nargs="+", required=True, metavar="BYTES")
    made.add_argument("--answering", action="store_true", help=argparse.SUPPRESS)
    return made


def main() -> None:
    options = sys.argv[1:]
    end = answering if parser().parse_args(options).answering else measuring
    end(options)


if __name__ == "__main__":
    main()
