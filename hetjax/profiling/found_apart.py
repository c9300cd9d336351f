# SPDX-License-Identifier: Apache-2.0
"""Does the work of `found_here.py` for devices that this process must not occupy.

A separate process measures each node of an unknown device kind. It sees only that
node's devices, as the node's worker will. `python -m hetjax.profiling.found_apart` is
that process. Owns the request and its answer. Does not own which devices a process
sees (`launchers/isolation.py`), nor how a process is run on another machine
(`launchers/launcher.py`).
"""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hetjax.cluster.catalogue import canonical_name, catalogue
from hetjax.cluster.cluster import DEVICE_FIGURES, Cluster, Node
from hetjax.cluster.cluster_files import cluster_toml, parse_cluster
from hetjax.errors import BadInput
from hetjax.files.parsing import json_value
from hetjax.profiling.found_here import cluster_here

_MARK = "hetjax found: "  # marks the answer, as libraries print, too
MODULE = "hetjax.profiling.found_apart"
LIMIT_S = 180.0  # for the start of JAX and at most 20 s per device kind

# Runs `python -m MODULE ARGUMENT` with the node's devices. The last parameter is a
# limit in seconds, after which it raises TimeoutExpired.
Run = Callable[[Node, str, str, float], subprocess.CompletedProcess[str]]


def as_found_apart(
    cluster: Cluster, run: Run, cache_dir: Path, limit_s: float = LIMIT_S
) -> Cluster:
    """Return the cluster with measured figures for unknown device kinds.

    Warns of what was measured, and raises BadInput, as `as_found` does. Raises BadInput
    also if a node's process gives no answer within `limit_s`.
    """
    nodes = [
        _measured(node, partial(run, node, MODULE, str(cache_dir)), limit_s)
        if _is_unknown(node)
        else node
        for node in cluster.nodes
    ]
    return replace(cluster, nodes=tuple(nodes))


def run_here(environments: Mapping[str, Mapping[str, str]]) -> Run:
    """Return a `Run` on this machine; `environments` is keyed by worker."""

    def run(
        node: Node, module: str, argument: str, limit_s: float
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", module, argument],
            capture_output=True,
            env={**os.environ, **environments[node.workers[0]]},
            text=True,
            timeout=limit_s,
        )

    return run


def _is_unknown(node: Node) -> bool:
    unsaid = any(getattr(node, key) is None for key in DEVICE_FIGURES)
    return unsaid and canonical_name(node.device) not in catalogue()


def _measured(
    node: Node, run: Callable[[float], subprocess.CompletedProcess[str]], limit_s: float
) -> Node:
    try:
        done = run(limit_s)
    except subprocess.TimeoutExpired:
        raise _no_answer(node, f"no answer in {limit_s:g} s") from None
    answer = _answer(node, done)
    if "error" in answer:
        raise BadInput(**answer["error"])
    for line in answer["warnings"]:
        warnings.warn(line, stacklevel=2)
    found = {each.device: each for each in parse_cluster(answer["cluster"]).nodes}
    if node.device not in found:
        raise _no_answer(node, f"its process sees {', '.join(found)}")
    keys = [key for key in (*DEVICE_FIGURES, "precision") if getattr(node, key) is None]
    return replace(node, **{key: getattr(found[node.device], key) for key in keys})


def _answer(node: Node, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not lines:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise _no_answer(node, said[-1])
    return json_value(lines[-1].removeprefix(_MARK))


def _no_answer(node: Node, why: str) -> BadInput:
    keys = ", ".join(f"{key} = ..." for key in DEVICE_FIGURES)
    return BadInput(
        got=f"node {node.name!r}: device {node.device!r} is not in the device catalogue"
        f" and was not measured: {why}",
        allowed="a device that can be measured, or one with figures of its own",
        fix=f"run hetjax doctor to see why, or add to the node: {keys}",
    )


def main(cache_dir: str) -> None:
    """Print the result of `cluster_here` for the devices that this process has."""
    from hetjax.mesh.accelerators import start_jax  # importing JAX takes a second

    answer: dict[str, Any]
    try:
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always", UserWarning)
            cluster, _ = cluster_here(start_jax(), Path(cache_dir))
        messages = [str(one.message) for one in noted if one.category is UserWarning]
        answer = {"cluster": cluster_toml(cluster), "warnings": messages}
    except BadInput as bad:
        answer = {"error": {"got": bad.got, "allowed": bad.allowed, "fix": bad.fix}}
    print(_MARK + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
