# SPDX-License-Identifier: Apache-2.0
"""How fast arrays get from a device to one of another process, and to another device.

Each beside what costs count on: between the workers of two nodes a network card's
rate, inside a node that of its links. Owns the sizes and the rows. Does not own the
processes (`two_processes.py`).
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp

from experiments.gpu.clock import median_s
from experiments.gpu.one_stage import node_of
from experiments.gpu.rows import Row, without_names
from experiments.gpu.setting import Setting
from experiments.gpu.timed_programs import normal
from experiments.gpu.two_processes import TRANSPORTS
from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.network.routes import Place, route, trunks

_LIMIT_S = 60.0
_MIB = 1 << 20
_NAMES = {"sockets": "sockets", "transfer": "jax.experimental.transfer"}


def measure(setting: Setting) -> Iterator[Row]:
    node = node_of(setting.device)
    sizes = setting.choose((_MIB, 16 * _MIB, 64 * _MIB), (_MIB // 16, _MIB))
    first, second = TRANSPORTS  # the second was never seen on a card: it may hang
    yield from _between_processes(setting, first, sizes, node)
    yield from _between_devices(setting, sizes, node)
    yield from _between_processes(setting, second, sizes, node)


def works(transport: str) -> str:
    """Return what the row is called that says whether a transport works."""
    return f"{_NAMES[transport]} between two processes: what is sent arrives"


def _between_processes(
    setting: Setting, transport: str, sizes: tuple[int, ...], node: Node
) -> Iterator[Row]:
    command = [sys.executable, "-m", "experiments.gpu.two_processes", transport]
    command += ["--platform", setting.platform, "--sizes", *map(str, sizes)]
    limit_s = max(min(_LIMIT_S, setting.left_s() - 1), 0.0)
    why = ""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s
        )
        printed = done.stdout
        if done.returncode:
            why = without_names(done.stderr.decode(errors="replace"))
    except subprocess.TimeoutExpired as late:
        printed, why = late.stdout or b"", f"no end within {limit_s:.0f} s"
    told = [json.loads(line) for line in printed.splitlines()]
    arrived = len(told) == len(sizes) and all(each["are_equal"] for each in told)
    yield Row(what=works(transport), measured=arrived, note=why)
    workers = replace(node, name="a"), replace(node, name="b")
    cluster = Cluster(name="here", nodes=workers)
    for each in told:
        yield _row(
            f"{_NAMES[transport]} between two processes",
            each["num_bytes"],
            each["seconds"],
            counted_s(cluster, ("a", (0,)), ("b", (0,)), each["num_bytes"]),
        )


def _between_devices(
    setting: Setting, sizes: tuple[int, ...], node: Node
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
    """Return the seconds that a plan counts for a message that nothing else meets."""
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
