# SPDX-License-Identifier: Apache-2.0
"""Arrays that one process pulls from another on the accelerator, checked.

Owns both ends, by jax.experimental.transfer. Does not own how the runtime uses it
(`hetjax/comm/pull.py`).
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

TRANSFER_BYTES = (1 << 20, 16 << 20, 64 << 20)
_LIMIT_S = 300


def transfers(arguments: argparse.Namespace, device: jax.Device) -> dict[str, Any]:
    """This process offers; a child with the same devices pulls and checks."""
    server = _server(device)
    for uuid, num_bytes in enumerate(TRANSFER_BYTES):
        server.await_pull(uuid, [_pattern(num_bytes, device)])
    command = [sys.executable, "-m", "experiments.gpu.first_light", "pull"]
    command += ["--platform", arguments.platform, "--address", server.address()]
    child = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    if child.returncode:
        return {"works": False, "error": child.stderr[-2000:]}
    found = json.loads(child.stdout.splitlines()[-1])
    return {name: found[name] for name in ("works", "bytes_per_s")}


def pull(arguments: argparse.Namespace, device: jax.Device) -> dict[str, Any]:
    """The child: `--address` says where the arrays are."""
    server = _server(device)
    connection = server.connect(arguments.address)
    rates, right = {}, True
    for uuid, num_bytes in enumerate(TRANSFER_BYTES):
        wanted = _pattern(num_bytes, device)
        sharding = SingleDeviceSharding(device)
        spec = jax.ShapeDtypeStruct(wanted.shape, wanted.dtype, sharding=sharding)
        start_s = time.perf_counter()
        (found,) = jax.block_until_ready(connection.pull(uuid, [spec]))
        rates[str(num_bytes)] = num_bytes / (time.perf_counter() - start_s)
        right &= bool(jnp.array_equal(found, wanted))
    return {"works": right, "bytes_per_s": rates}


def _server(device: jax.Device) -> Any:
    any_port = "127.0.0.1:0"
    return transfer.start_transfer_server(
        device.client, any_port, [any_port] * 4, transfer_size=1 << 20
    )


def _pattern(num_bytes: int, device: jax.Device) -> jax.Array:
    return jax.device_put(jnp.arange(num_bytes // 4, dtype=jnp.float32), device)
