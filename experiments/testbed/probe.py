# SPDX-License-Identifier: Apache-2.0
"""Works on a host: a busy loop, or an end of a plain socket. Prints JSON.

    python probe.py loop NUM_ROUNDS
    python probe.py receive ADDRESS
    python probe.py send ADDRESS PORT NUM_BYTES

Owns what a measurement runs on a host. Uses only the standard library, so that it
starts at once. Does not own the measurements (`measured.py`).
"""

import json
import socket
import sys
import time

_CHUNK_BYTES = 1 << 20


def loop(num_rounds: int) -> dict[str, float]:
    """Count, and return the elapsed seconds and those on the CPU."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    total = 0
    for n in range(num_rounds):
        total += n
    return {
        "wall_s": time.perf_counter() - start_s,
        "cpu_s": time.process_time() - start_cpu_s,
    }


def receive(address: str) -> dict[str, int]:
    """Receive one connection's bytes to the end, then acknowledge their number."""
    with socket.create_server((address, 0)) as server:
        print(json.dumps({"port": server.getsockname()[1]}), flush=True)
        connection, _ = server.accept()
    num_bytes = 0
    buffer = bytearray(_CHUNK_BYTES)
    with connection:
        while taken := connection.recv_into(buffer):
            num_bytes += taken
        connection.sendall(num_bytes.to_bytes(8, "big"))
    return {"num_bytes": num_bytes}


def send(address: str, port: int, num_bytes: int) -> dict[str, float]:
    """Send `num_bytes` bytes; the seconds end with the acknowledgement."""
    chunk = memoryview(bytes(_CHUNK_BYTES))
    with socket.create_connection((address, port)) as connection:
        start_s = time.perf_counter()
        for first in range(0, num_bytes, _CHUNK_BYTES):
            connection.sendall(chunk[: num_bytes - first])
        connection.shutdown(socket.SHUT_WR)
        taken = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")
        wall_s = time.perf_counter() - start_s
    assert taken == num_bytes
    return {"wall_s": wall_s, "bytes_per_s": num_bytes / wall_s}


def main(words: list[str]) -> None:
    task, *arguments = words
    if task == "loop":
        print(json.dumps(loop(int(arguments[0]))))
    elif task == "receive":
        print(json.dumps(receive(arguments[0])))
    else:
        assert task == "send"
        address, port, num_bytes = arguments
        print(json.dumps(send(address, int(port), int(num_bytes))))


if __name__ == "__main__":
    main(sys.argv[1:])
