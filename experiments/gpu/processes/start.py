# SPDX-License-Identifier: Apache-2.0
"""Starts JAX as a worker does, and reports the memory that it got.

    python -m experiments.gpu.processes.start --platform cuda

Prints one JSON object (`Started`). Owns what it tries, and how another process starts
it. Does not own the conclusions (`parts/memory.py`).
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp

from experiments.gpu.models.one_stage import node_of
from experiments.gpu.rows import without_names
from hetjax.cluster.cluster import Node
from hetjax.cluster.memory_budget import node_plan_bytes
from hetjax.cluster.speeds import Speeds

_PIECES = 32  # arrays that together fill what plans may fill


class NotStarted(Exception):
    """The process ended before it could report; the text says why."""


class NotInTime(NotStarted):
    """The process might have started with more time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """`node` is the device as the product finds it. `bytes_limit` is what JAX has of
    it, `used_bytes` what its driver reports as used; None where not reported.
    `is_filled` says whether the process held as much as plans may fill. It is None on a
    CPU, which shares its memory with everything else."""

    node: Node
    bytes_limit: int | None
    used_bytes: int | None
    is_filled: bool | None


def started(platform: str, share: float, limit_s: float) -> Started:
    """Start a process with this share of a GPU's memory. Raises NotStarted if it fails,
    NotInTime if it exceeds the limit."""
    variables = os.environ | {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:g}",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
    }
    variables.pop("XLA_CLIENT_MEM_FRACTION", None)  # JAX refuses to start with both
    command = [
        sys.executable,
        "-m",
        "experiments.gpu.processes.start",
        "--platform",
        platform,
    ]
    try:
        done = subprocess.run(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=True,
        )
    except subprocess.CalledProcessError as failed:
        raise NotStarted(without_names(failed.stderr)) from failed
    except subprocess.TimeoutExpired as late:
        raise NotInTime(f"not within {limit_s:.0f} s") from late
    told = json.loads(done.stdout.splitlines()[-1])
    node = told["node"]
    node = Node(**node | {"speeds": Speeds(**node["speeds"])})
    return Started(**told | {"node": node})


def here(device: jax.Device) -> Started:
    """Run a program, fill the memory, and report what was found."""
    jax.block_until_ready(jnp.ones((), device=device) + 1)
    node = node_of(device)
    limit = (device.memory_stats() or {}).get("bytes_limit")
    used_bytes = _used_bytes()  # now the driver counts the allocator's memory, too
    is_filled = None if limit is None else _is_filled(device, node_plan_bytes(node))
    return Started(
        node=node, bytes_limit=limit, used_bytes=used_bytes, is_filled=is_filled
    )


def _is_filled(device: jax.Device, num_bytes: float) -> bool:
    """Return whether arrays of `num_bytes` in all can exist at once."""
    size = int(num_bytes) // _PIECES
    try:
        held = [jnp.ones(size, jnp.uint8, device=device) for _ in range(_PIECES)]
        jax.block_until_ready(held)
    except RuntimeError:  # XLA's, when memory is exhausted
        return False
    return True


def _used_bytes() -> int | None:
    """Return the bytes that all processes use; None unless there is one card."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = told.stdout.split()
    only = lines[0] if len(lines) == 1 else ""
    return int(only) << 20 if only.isdigit() else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", default="cuda")
    device = jax.local_devices(backend=parser.parse_args().platform)[0]
    print(json.dumps(asdict(here(device))))


if __name__ == "__main__":
    main()
