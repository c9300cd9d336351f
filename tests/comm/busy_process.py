# SPDX-License-Identifier: Apache-2.0
"""A process connected to its parent, which lets none of its other threads run.

Arguments: the address and secret of peer `z`, the time of silence, seconds. For that
many seconds it holds the interpreter's lock and computes on as many threads as there
are cores. Then it sends a message and sleeps.
"""

import ctypes
import hashlib
import os
import sys
import threading
import time

import numpy as np

from hetjax.comm.peers import Peers

_LARGE = bytes(64 << 20)  # hashed without the interpreter's lock


def main(address: str, secret: str, silence_s: str, busy_s: str) -> None:
    peers = Peers("busy", "127.0.0.1:0", bytes.fromhex(secret), float(silence_s))
    peers.connect({"z": address}, 10.0)
    end_s = time.monotonic() + float(busy_s)

    def compute() -> None:
        while time.monotonic() < end_s:
            hashlib.sha256(_LARGE)

    for _ in range(os.cpu_count() or 1):
        threading.Thread(target=compute, daemon=True).start()
    ctypes.PyDLL(None).usleep(int(1e6 * float(busy_s)))  # a PyDLL keeps the lock
    peers.send("z", (0, 0, 0, 0, 0, 0), [np.arange(3)])
    time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
