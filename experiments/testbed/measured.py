# SPDX-License-Identifier: Apache-2.0
"""Measures a testbed's hosts and links against their settings.

Owns the self-test: the same busy loop on each host, a plain socket between neighbours.
Does not own the loop and the socket (`probe.py`) nor the hosts (`hosts.py`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments.testbed.hosts import Host, Testbed

_PROBE = [sys.executable, "-I", str(Path(__file__).with_name("probe.py"))]
_LOOP_CPU_S = 0.5
_CALIBRATION_ROUNDS = 2_000_000
_SEND_S = 1.0
_UNLIMITED_BYTES = 256 << 20


def self_test(testbed: Testbed) -> dict[str, Any]:
    """Return the measured speed of each host and link of a testbed."""
    num_rounds = _rounds()
    links = zip(testbed.hosts, testbed.hosts[1:] + testbed.hosts[:1], strict=True)
    return {
        "quota_less": testbed.quota_less,
        "load_before": os.getloadavg()[0],  # other work takes CPU from the hosts
        "num_cores": len(os.sched_getaffinity(0)),
        "loop_one_by_one": _told(
            testbed,
            [_read(_start_loop(testbed, host, num_rounds)) for host in testbed.hosts],
        ),
        "loop_at_once": _told(testbed, _loop_at_once(testbed, num_rounds)),
        "links": [link_speed(testbed, sender, to.name) for sender, to in links],
    }


def link_speed(testbed: Testbed, sender: Host, receiver: str) -> dict[str, Any]:
    """Return the rate of a plain socket from one host to another, outside quotas."""
    rate = sender.egress_mbit_per_s
    num_bytes = _UNLIMITED_BYTES if rate is None else round(rate * 1e6 / 8 * _SEND_S)
    address = testbed.address(receiver)
    words = [*testbed.network_prefix(receiver), *_PROBE, "receive", address]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = json.loads(server.stdout.readline())["port"]
            words = [address, str(port), str(num_bytes)]
            sent = _read(_start(testbed.network_prefix(sender.name), "send", *words))
        finally:
            server.kill()
    told = {"from": sender.name, "to": receiver, "num_bytes": num_bytes, **sent}
    if rate is not None and not testbed.quota_less:
        told |= {"of_rate": sent["bytes_per_s"] / (rate * 1e6 / 8)}
    return told


def _loop_at_once(testbed: Testbed, num_rounds: int) -> list[dict[str, float]]:
    started = [_start_loop(testbed, host, num_rounds) for host in testbed.hosts]
    return [_read(process) for process in started]


def _rounds() -> int:
    """Return how many rounds of the loop take `_LOOP_CPU_S` without a quota."""
    cpu_s = _read(_start([], "loop", str(_CALIBRATION_ROUNDS)))["cpu_s"]
    return round(_CALIBRATION_ROUNDS * _LOOP_CPU_S / cpu_s)


def _told(testbed: Testbed, read: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Return each host's loop, its time over the first host's, and the expected ratio.

    A loop has one thread: more than 100 % equals no quota.
    """
    hosts = () if testbed.quota_less else testbed.hosts
    percents = [min(host.cpu_percent or 100.0, 100.0) for host in hosts]
    percents = percents or [100.0] * len(testbed.hosts)
    return [
        {
            "host": host.name,
            "cpu_percent": percent,
            "measured_percent": 100 * times["cpu_s"] / times["wall_s"],
            "of_first": times["wall_s"] / read[0]["wall_s"],
            "of_first_by_quota": percents[0] / percent,
            **times,
        }
        for host, percent, times in zip(testbed.hosts, percents, read, strict=True)
    ]


def _start_loop(
    testbed: Testbed, host: Host, num_rounds: int
) -> "subprocess.Popen[str]":
    return _start(testbed.prefix(host.name), "loop", str(num_rounds))


def _start(prefix: list[str], *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*prefix, *_PROBE, *words], stdout=subprocess.PIPE, text=True
    )


def _read(process: "subprocess.Popen[str]") -> dict[str, float]:
    with process:
        text, _ = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"{process.args} ended with {process.returncode}")
    return json.loads(text)
