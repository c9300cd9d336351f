# SPDX-License-Identifier: Apache-2.0
"""Starts a real Ray node on each host of a testbed, with the head on the first.

Owns the start of the nodes, what a driver needs to join them, and the end of exactly
these processes. Ray's own processes stay outside the CPU quotas; its workers, and so
actors, put themselves under their host's quota when they start. Does not own the hosts
(`hosts.py`).
"""

import importlib.util
import json
import math
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments.testbed import cpu_quota, processes
from experiments.testbed.hosts import Host, Testbed
from hetjax.errors import BadInput

HOST_VARIABLE = "HETJAX_TESTBED_HOST"
_MARK = "HETJAX_TESTBED_RAY"
_PORT = 6379
_OBJECT_STORE_BYTES = 100_000_000
_START_S = 120.0
_GRACE_S = 1.0  # nothing that matters here takes longer
_ROOT = str(Path(__file__).parents[2])
# Ray's workers call the function that this variable names when they start. Ray itself
# passes the setup hook of a runtime environment on in this way, and it needs no agent.
_WORKER_HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
_JOIN = f"{cpu_quota.__name__}.{cpu_quota.join_group.__name__}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RayNodes:
    """Running Ray nodes; a driver needs `environment` in its own to join them."""

    address: str
    environment: dict[str, str]


@contextmanager
def ray_nodes(testbed: Testbed) -> Iterator[RayNodes]:
    """Start Ray on every host for the time of the block.

    A host's node has the resource `hetjax_node_NAME`, 1 of it. Drivers must run on a
    host, by its `network_prefix`. Raises BadInput without Ray or on a quota-less
    testbed, whose hosts are one machine to Ray.
    """
    _check(testbed)
    undo = ExitStack()
    try:
        yield _start_all(testbed, undo)
    finally:
        with processes.undisturbed():
            undo.close()


def _start_all(testbed: Testbed, undo: ExitStack) -> RayNodes:
    with processes.undisturbed():
        # short, because paths of Unix sockets have at most 107 characters
        folder = Path(tempfile.mkdtemp(prefix="hetjax-ray-", dir="/tmp"))
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    address = f"{testbed.address(testbed.hosts[0].name)}:{_PORT}"
    head = ["--head", f"--port={_PORT}", f"--temp-dir={folder}"]
    head += ["--include-dashboard=false"]
    mark = secrets.token_hex(8)
    sessions: set[int] = set()
    ours = partial(_ours, testbed, sessions, mark)
    undo.callback(processes.end, ours, grace_s=_GRACE_S)
    for n, host in enumerate(testbed.hosts):
        joins = head if n == 0 else [f"--address={address}"]
        words = start_words(host, testbed.address(host.name)) + joins
        _start(testbed, host.name, words, auth | {_MARK: mark}, sessions)
    return RayNodes(address=address, environment=auth | {"RAY_ADDRESS": address})


def start_words(host: Host, address: str) -> list[str]:
    """Return the command that starts a host's node, without --head or --address."""
    num_cpus = math.ceil((host.cpu_percent or 100.0) / 100)
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start"),
        f"--node-ip-address={address}",
        f"--num-cpus={num_cpus}",
        "--num-gpus=0",
        f"--resources={json.dumps({f'hetjax_node_{host.name}': 1})}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        "--disable-usage-stats",
    ]


def _start(
    testbed: Testbed,
    host: str,
    words: list[str],
    variables: dict[str, str],
    sessions: set[int],
) -> None:
    paths = [_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **{name: text for name, text in os.environ.items() if name != "RAY_ADDRESS"},
        **variables,
        HOST_VARIABLE: host,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    group = testbed.cpu_group(host)
    if group is not None:
        environment |= {cpu_quota.GROUP_VARIABLE: str(group), _WORKER_HOOK: _JOIN}
    with subprocess.Popen(
        [*testbed.network_prefix(host), *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        sessions.add(process.pid)
        try:
            text, _ = process.communicate(timeout=_START_S)
        finally:
            process.kill()
    if process.returncode != 0:
        raise RuntimeError(f"Ray did not start on host {host!r}:\n{text}")


def _ours(testbed: Testbed, sessions: set[int], mark: str) -> set[int]:
    """Return the processes that were started on the hosts with these nodes.

    Nodes stay in the session of their start. Their children may leave it, but keep the
    mark in their environment; a process that renames itself may overwrite that.
    """
    pids = set().union(*(testbed.members(host.name) for host in testbed.hosts))
    return {
        pid
        for pid in pids
        if _session(pid) in sessions or f"{_MARK}={mark}" in _environment(pid)
    }


def _session(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


def _environment(pid: int) -> list[str]:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    return []


def _check(testbed: Testbed) -> None:
    if testbed.quota_less:
        raise BadInput(
            got="a quota-less testbed",
            allowed="Ray nodes on hosts with an address of their own",
            fix="run as root without --quota-less, or without --ray",
        )
    if importlib.util.find_spec("ray") is None:
        raise BadInput(
            got="no package `ray`",
            allowed="Ray nodes where Ray is installed",
            fix="pip install 'hetjax[ray]'",
        )
