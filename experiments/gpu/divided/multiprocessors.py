# SPDX-License-Identifier: Apache-2.0
"""Prints how many multiprocessors the first card shows to this process.

    python -m experiments.gpu.divided.multiprocessors

Asks CUDA's driver. The process's environment selects the card and, for a client of MPS,
the client's share of it. Makes a context, so that a service that does not work fails
here at once. Needs no JAX.
"""

import ctypes
import subprocess
import sys
from collections.abc import Mapping

_MULTIPROCESSOR_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_LIMIT_S = 15.0


class NoContext(Exception):
    """A process with this environment cannot compute on the card."""


def multiprocessors(environment: Mapping[str, str]) -> int:
    """Return the number in a process with this environment; NoContext if it fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "experiments.gpu.divided.multiprocessors"],
            capture_output=True,
            text=True,
            env=dict(environment),
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise NoContext(f"no answer of CUDA in {_LIMIT_S:g} s") from None
    if done.returncode:
        raise NoContext(done.stderr.strip().splitlines()[-1])
    return int(done.stdout)


def _seen_here() -> int:
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        if code := getattr(cuda, name)(*arguments):
            sys.exit(f"{name}: CUDA error {code}")

    device, context, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    attribute = ctypes.c_int(_MULTIPROCESSOR_COUNT)
    call("cuDeviceGetAttribute", ctypes.byref(count), attribute, device)
    return count.value


if __name__ == "__main__":
    print(_seen_here())
