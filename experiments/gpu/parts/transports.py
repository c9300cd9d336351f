# SPDX-License-Identifier: Apache-2.0
"""Measures transfer rates to a device of another process, and to another local device.

Compares each with what costs assume: between the workers of two nodes a network card's
rate, inside a node that of its links. Owns the sizes and the rows. Does not own the
processes (`two_processes.py`).
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from experiments.gpu.models.one_stage import node_of
from experiments.gpu.processes.two_processes import TRANSPORTS
from experiments.gpu.rows import Row, without_names
from experiments.gpu.setting import Setting
from experiments.gpu.timing.clock import median_s
from experiments.gpu.timing.timed_programs import normal
from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.network.routes import Place, route, trunks

_LAST_S = 2.0  # kept for the measurements in this process
_LONGEST_S = 600.0
_MIB = 1 << 20
_NAMES = {"sockets": "sockets", "transfer": "jax.experimental.transfer"}

Told = dict[str, Any]  # a line of `two_processes.py`


def measure(setting: Setting) -> Iterator[Row]:
    sizes = setting.choose((_MIB, 16 * _MIB, 64 * _MIB), (_MIB // 16, _MIB))
    command = [sys.executable, "-m", "experiments.gpu.processes.two_processes"]
    command += ["--platform", setting.platform, "--sizes", *map(str, sizes)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        node = node_of(setting.device)  # JAX starts in all processes at once
        told, why, is_late = ended(process, setting.left_s() - _LAST_S)
        yield from between_processes(told, why, is_late, sizes, node)
    finally:
        process.kill()
    yield from _between_devices(setting, sizes, node)


def works(transport: str) -> str:
    """Return the name of the row that says whether a transport works."""
    return f"{_NAMES[transport]} between two processes: what is sent arrives"


def ended(
    process: subprocess.Popen[bytes], limit_s: float
) -> tuple[list[Told], str, bool]:
    """Return the lines that the process printed, why it printed no more, and whether
    it ran out of time."""
    limit_s, why, is_late = min(limit_s, _LONGEST_S), "", False
    try:
        printed, errors = process.communicate(timeout=limit_s)
        if process.returncode:
            why = without_names(errors.decode(errors="replace"))
    except subprocess.TimeoutExpired:
        process.kill()
        printed, _ = process.communicate()
        why, is_late = f"no end within {limit_s:.0f} s", True
    return [json.loads(line) for line in printed.splitlines()], why, is_late


def between_processes(
    told: Sequence[Told],
    why: str,
    is_late: bool,
    sizes: Sequence[int],
    node: Node,
) -> Iterator[Row]:
    """Yield whether each transport carried arrays of all sizes, and how fast. The
    answer is None if the time ended first."""
    workers = replace(node, name="a"), replace(node, name="b")
    cluster = Cluster(name="here", nodes=workers)
    for transport in TRANSPORTS:
        mine = [each for each in told if each["transport"] == transport]
        is_whole = len(mine) == len(sizes)
        arrived = is_whole and all(each["are_equal"] for each in mine)
        is_known = is_whole or not is_late
        note = "" if is_whole else why
        measured = arrived if is_known else None
        yield Row(what=works(transport), measured=measured, note=note)
        for each in mine:
            yield _row(
                f"{_NAMES[transport]} between two processes",
                each["num_bytes"],
                each["seconds"],
                counted_s(cluster, ("a", (0,)), ("b", (0,)), each["num_bytes"]),
            )


def _between_devices(
    setting: Setting, sizes: Sequence[int], node: Node
) -> Iterator[Row]:
    what = "device to device of one process"
    here = jax.local_devices(backend=setting.platform)
    if len(here) < 2:
        yield Row(what=what, measured=None, note="there is one device")
        return
    source, target = here[:2]
    cluster = Cluster(name="here", nodes=(replace(node, name="a", count=2),))
    for num_bytes in sizes:
        x = normal(source, (num_bytes // 4,), "float32")
        seconds = median_s(lambda x=x: jax.device_put(x, target))
        there = jax.device_put(jax.device_put(x, target), source)
        predicted_s = counted_s(cluster, ("a", (0,)), ("a", (1,)), num_bytes)
        arrived = "" if jnp.array_equal(x, there) else "something else arrived"
        yield _row(what, num_bytes, seconds, predicted_s, arrived)


def counted_s(cluster: Cluster, source: Place, target: Place, num_bytes: int) -> float:
    """Return the seconds that a plan counts for a message without contention."""
    way, rates = route(cluster, source, target), trunks(cluster)
    return way.latency_s + num_bytes / min(rates[name] for name in way.trunks)


def _row(
    way: str, num_bytes: int, seconds: float, predicted_s: float, note: str = ""
) -> Row:
    return Row(
        what=f"{way}, {num_bytes / _MIB:g} MiB",
        measured=num_bytes / seconds / 1e9,
        unit="GB/s",
        predicted=num_bytes / predicted_s / 1e9,
        note=note,
    )
