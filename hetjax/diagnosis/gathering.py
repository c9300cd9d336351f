# SPDX-License-Identifier: Apache-2.0
"""Gathers the facts: what is installed, what starts, what answers, and how fast.

All side effects are here. Every query has a timeout. Owns the queries. Does not own the
judgement of the answers (`checks.py`).
"""

import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from tempfile import NamedTemporaryFile

from hetjax.checkpoint.storage import open_store
from hetjax.checkpoint.stores.store import answer_within
from hetjax.cluster.catalogue import canonical_name, device_spec
from hetjax.cluster.cluster_files import load_cluster
from hetjax.diagnosis.devices import MARK
from hetjax.diagnosis.facts import (
    ClusterFile,
    Facts,
    Installed,
    Port,
    RunDirectory,
    Seen,
    Started,
    StoreAnswer,
)
from hetjax.diagnosis.peers import ask, listen
from hetjax.diagnosis.store_trial import trial
from hetjax.errors import BadInput
from hetjax.files.parsing import json_value
from hetjax.mesh.accelerators import visible_accelerator
from hetjax.mesh.driver import driver_cards
from hetjax.training.directory.rundir import locked

_NAMED = ("hetjax", "jax", "jaxlib", "flax", "libtpu", "nvidia-cudnn-cu12")
_PLUGIN = "jax-"  # of cuda12, cuda13, rocm7: plugins and their runtimes
_VARIABLES = (
    *("JAX_PLATFORMS", "JAX_PLATFORM_NAME"),
    *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
)
_START_S = 45.0  # for JAX on a machine with many cards
_DISK_S = 8.0
_STORE_S = 15.0
_WRITE_S = 1.0
_WRITE_BYTES = 64 << 20
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """What to check besides this machine; `root` is the root of its file system."""

    cluster: Path | None = None
    run_dir: Path | None = None
    cloud: str | None = None
    endpoint: str | None = None
    ports: tuple[int, ...] = ()
    peers: tuple[str, ...] = ()
    root: Path = Path("/")


def gather(asked: Scope) -> Facts:
    """Gather all facts; start JAX and measure peers in parallel with the others."""
    with ThreadPoolExecutor(2 + len(asked.peers)) as pool:
        started = pool.submit(start_devices)
        peers = [pool.submit(ask, address) for address in asked.peers]
        return Facts(
            installed=installed(asked.root),
            cluster=asked.cluster and cluster_file(asked.cluster),
            run_dir=asked.run_dir and _run_dir_in_time(asked.run_dir),
            store=None
            if asked.cloud is None
            else store_answer(asked.cloud, asked.endpoint),
            ports=tuple(map(port, asked.ports)),
            started=started.result(),
            peers=tuple(peer.result() for peer in peers),
        )


def installed(root: Path = Path("/")) -> Installed:
    """Return the packages of this Python, and the system and hardware here."""
    found = {one.metadata["Name"].lower(): one.version for one in distributions()}
    plugins = sorted(n for n in found if n.startswith(_PLUGIN) and _is_plugin(n))
    names = [name for name in (*_NAMED, *plugins) if name in found]
    return Installed(
        system=_system(),
        versions={name: found[name] for name in names},
        variables={n: os.environ[n] for n in _VARIABLES if n in os.environ},
        visible=visible_accelerator(root),
        cards=driver_cards(),
    )


def _is_plugin(name: str) -> bool:
    return name.endswith(("-plugin", "-pjrt"))


def _system() -> str:
    wsl = " (WSL)" * ("microsoft" in platform.release().lower())
    return f"Python {platform.python_version()}, {platform.system()}{wsl}"


def start_devices(
    command: Sequence[str] = (sys.executable, "-m", "hetjax.diagnosis.devices"),
    limit_s: float = _START_S,
) -> Started:
    """Start JAX in a separate process, which preallocates no memory of cards."""
    variables = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, env=variables
        )
    except subprocess.TimeoutExpired:
        return Started(error=f"no answer in {limit_s:g} s: a driver or device hangs")
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return Started(error=said[-1])
    answer = json_value(lines[-1].removeprefix(MARK))
    if "error" in answer:
        return Started(error=answer["error"])
    return Started(devices=tuple(Seen(**one) for one in answer["devices"]))


def cluster_file(path: Path) -> ClusterFile:
    """Read a cluster file, and look up its devices."""
    try:
        cluster = load_cluster(path)
        specs = [device_spec(node) for node in cluster.nodes]
    except BadInput as bad:
        return ClusterFile(path=str(path), error=bad.got, fix=bad.fix)
    counts: Counter[str] = Counter()
    for node in cluster.nodes:
        counts[canonical_name(node.device)] += node.count
    slowest = min(
        [spec.network_gbit_per_s for spec in specs]
        + [link.bandwidth_gbit_per_s for link in cluster.links]
    )
    return ClusterFile(path=str(path), kinds=counts, network_gbit_per_s=slowest)


def _run_dir_in_time(path: Path) -> RunDirectory:
    late = f"run directory {str(path)!r} does not answer in {_DISK_S:g} s"
    fix = "check that its file server is up (mount, df), or give another --run-dir"
    try:
        return answer_within(_DISK_S, lambda: run_directory(path))
    except TimeoutError:
        return RunDirectory(path=str(path), error=late, fix=fix)


def run_directory(path: Path) -> RunDirectory:
    """Lock the directory as a run would, then measure how fast its disk writes."""
    try:
        with locked(path):
            pass
        return _written(RunDirectory(path=str(path)), nearest_folder(path))
    except BadInput as bad:
        return RunDirectory(path=str(path), error=bad.got, fix=bad.fix)
    except OSError as error:
        return RunDirectory(
            path=str(path),
            error=f"run directory {str(path)!r}: {error.strerror}",
            fix="make room on its disk, or give another --run-dir",
        )


def nearest_folder(path: Path) -> Path:
    """Return the folder itself, or the nearest above it that exists."""
    return next(p for p in (path, *path.absolute().parents) if p.is_dir())


def _written(found: RunDirectory, folder: Path) -> RunDirectory:
    piece, written = bytes(_PIECE_BYTES), 0
    with NamedTemporaryFile(dir=folder, prefix=".hetjax-doctor-") as file:
        start_s = time.perf_counter()
        while written < _WRITE_BYTES and time.perf_counter() - start_s < _WRITE_S:
            file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            written += len(piece)
        spent_s = time.perf_counter() - start_s
        ahead_s = os.stat(file.name).st_mtime - time.time()
    return replace(
        found,
        free_gib=shutil.disk_usage(folder).free / 2**30,
        write_mb_per_s=written / spent_s / 1e6,
        clock_ahead_s=ahead_s,
    )


def store_answer(url: str, endpoint: str | None = None) -> StoreAnswer:
    """Use the store as a run does."""
    start_s = time.perf_counter()
    try:
        ahead_s = answer_within(
            _STORE_S, lambda: trial(open_store(url, endpoint=endpoint), url)
        )
    except TimeoutError:
        return StoreAnswer(
            url=url,
            error=f"checkpoint store {url} does not answer in {_STORE_S:g} s",
            fix="check that this machine reaches the store's network",
        )
    except BadInput as bad:
        return StoreAnswer(url=url, error=bad.got, fix=bad.fix)
    except Exception as error:  # any error of a client library
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        fix = "correct what the store reports, or leave --checkpoint.cloud out"
        return StoreAnswer(url=url, error=f"checkpoint store {url}: {problem}", fix=fix)
    spent_s = time.perf_counter() - start_s
    return StoreAnswer(url=url, seconds=spent_s, clock_ahead_s=ahead_s)


def port(number: int) -> Port:
    """Listen on a port briefly; return whether that worked."""
    try:
        listen(number).close()
    except OSError as error:
        return Port(number=number, error=error.strerror or str(error))
    return Port(number=number)
