# SPDX-License-Identifier: Apache-2.0
"""Divides one device into two unequal shares, each a node with its own processes.

Owns the environment of a share's processes, the cluster whose nodes are the shares, and
measuring a model's layers on each share. Does not own the service that divides a card
(`mps.py`), nor what is planned and trained (`parts/unequal.py`).
"""

import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from experiments.gpu.processes.background import python_module
from experiments.gpu.setting import OutOfTime
from hetjax.cluster.catalogue import best_precision, device_spec
from hetjax.cluster.cluster import Cluster, Link, Node
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.cluster.local_devices import LocalDevice
from hetjax.cluster.memory_budget import GPU_ALLOCATOR_FRACTION
from hetjax.costs.measured.layer_profile import Profile, check_values, read_profile
from hetjax.diagnosis.peers import answer, ask
from hetjax.launchers.local_processes import LOOPBACK
from hetjax.mesh.process_setup import malloc_environment
from hetjax.profiling.found_apart import as_found_apart, run_here

LARGER, SMALLER = "larger", "smaller"
FRACTIONS = {LARGER: 0.7, SMALLER: 0.3}
_UNOPTIMISED = "--xla_backend_optimization_level=0"  # a few times slower, on CPUs


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A part of a device; `environment` makes a process compute on it."""

    name: str
    fraction: float
    environment: Mapping[str, str]

    @property
    def variables(self) -> Mapping[str, str]:
        """The whole environment of a process of the share."""
        return {**os.environ, **malloc_environment(), **self.environment}


def shares_of_card(clients: Mapping[str, str]) -> tuple[Share, ...]:
    """Return two shares of the one card that `clients` of the service see."""
    return tuple(
        Share(
            name=name,
            fraction=fraction,
            environment={
                **clients,
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{100 * fraction:g}",
                "XLA_PYTHON_CLIENT_MEM_FRACTION": (
                    f"{GPU_ALLOCATOR_FRACTION * fraction:.3f}"
                ),
                "XLA_CLIENT_MEM_FRACTION": "",  # JAX refuses to start with both
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            },
        )
        for name, fraction in FRACTIONS.items()
    )


def shares_of_cpu() -> tuple[Share, ...]:
    """Return two CPUs of one thread each. Programs of the second are compiled without
    optimisation, which makes a slower device without any privilege."""
    own = {"JAX_PLATFORMS": "cpu", "PJRT_NPROC": "1"}
    slow = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {_UNOPTIMISED}"}
    return (
        Share(name=LARGER, fraction=FRACTIONS[LARGER], environment=own),
        Share(name=SMALLER, fraction=FRACTIONS[SMALLER], environment=own | slow),
    )


def cluster_of_shares(
    shares: Sequence[Share], device: str, memory_gib: float, folder: Path
) -> Cluster:
    """Return a cluster with a node for each share and the measured loopback link.

    A kind of card that the catalogue lacks is measured, too.
    """
    nodes = tuple(
        Node(
            name=share.name,
            device=device,
            count=1,
            memory_gib=share.fraction * memory_gib,
        )
        for share in shares
    )
    cluster = Cluster(name="shares", nodes=nodes, links=(_loopback(),))
    run = run_here({share.name: share.environment for share in shares})
    return as_found_apart(cluster, run, folder)


def _loopback() -> Link:
    """Return the link between the two processes, measured as `doctor --peers` does."""
    with closing(socket.create_server((LOOPBACK, 0))) as listening:
        port = listening.getsockname()[1]
        with ThreadPoolExecutor(1) as pool:
            pool.submit(answer, listening)
            peer = ask(f"{LOOPBACK}:{port}")
            listening.close()  # which ends `answer`
    if peer.error:
        raise RuntimeError(f"loopback was not measured: {peer.error}")
    return Link(
        between=(LARGER, SMALLER),
        bandwidth_gbit_per_s=peer.gbit_per_s,
        latency_ms=peer.latency_ms,
    )


def as_kinds(cluster: Cluster, shares: Sequence[Share]) -> Cluster:
    """Return the same nodes as devices of two kinds, because the planner needs kinds.

    A profile gives the time of each kind; the peak is used where a profile has none.
    """
    nodes = tuple(
        _as_kind(cluster.node(share.name), share.fraction) for share in shares
    )
    return replace(cluster, nodes=nodes)


def _as_kind(node: Node, fraction: float) -> Node:
    spec = device_spec(node)
    return replace(
        node,
        device=kind_of(node.name),
        peak_tflops=fraction * spec.peak_tflops,
        memory_gib=spec.memory_gib,
        memory_gb_per_s=spec.memory_gb_per_s,
        intra_node_gb_per_s=spec.intra_node_gb_per_s,
        network_gbit_per_s=spec.network_gbit_per_s,
        precision=best_precision(spec),
    )


def kind_of(share: str) -> str:
    """Return the name of the device kind that the planner sees for a share."""
    return f"{share}-share"


def profiled(
    shares: Sequence[Share],
    cluster: Cluster,
    model: str,
    folder: Path,
    logs: Path,
    options: Sequence[str],
    limit_s: float,
) -> Profile:
    """Measure the model's layers on all shares at the same time, as in training.

    `options` are those of `hetjax.profile`. Each measurement carries its share's kind.
    OutOfTime names the share whose profile did not end.
    """

    def measure(share: Share) -> Profile:
        log = logs / f"profile-{share.name}.txt"
        return _profile(share, cluster, model, folder, log, options, limit_s)

    with ThreadPoolExecutor(len(shares)) as pool:
        found = list(pool.map(measure, shares))
    measurements = tuple(
        replace(measurement, device=kind_of(share.name))
        for share, profile in zip(shares, found, strict=True)
        for measurement in profile.measurements
    )
    together = replace(found[0], measurements=measurements, links=())
    check_values(together)
    return together


def _profile(
    share: Share,
    cluster: Cluster,
    model: str,
    folder: Path,
    log: Path,
    options: Sequence[str],
    limit_s: float,
) -> Profile:
    file, output = folder / f"{share.name}.toml", folder / f"{share.name}.json"
    node = cluster.node(share.name)
    file.write_text(cluster_toml(replace(cluster, nodes=(node,), links=())))
    words = ["profile", model, "--no-simulate", "--cluster", str(file)]
    words += ["--output", str(output), "--tensor", "1", "--remat", "none", *options]
    module, what = (
        "experiments.islands.models",
        f"the profile of the {share.name} share",
    )
    with python_module(log, module, words, share.variables) as run:
        code = run.exit_code(limit_s)
    if code is None:
        raise OutOfTime(f"{what} did not end in {limit_s:.0f} s")
    if code:
        raise RuntimeError(f"{what}: exit code {code}; {run.tail}")
    return read_profile(output)


def memory_gib_of(card: LocalDevice) -> float:
    return card.memory_bytes / 2**30
