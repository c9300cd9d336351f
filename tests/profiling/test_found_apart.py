# SPDX-License-Identifier: Apache-2.0
"""Processes that see only their devices measure unknown kinds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetjax.cluster.cluster import DEVICE_FIGURES, Cluster, Node
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.errors import BadInput
from hetjax.launchers import by_joining
from hetjax.profiling.found_apart import (
    _MARK,
    MODULE,
    Run,
    _answer,
    as_found_apart,
    run_here,
)

FIGURES: dict[str, Any] = {key: 10.0 + i for i, key in enumerate(DEVICE_FIGURES)}
KNOWN = Node(name="old", device="T4", count=1)
NEW = Node(name="new", device="RTX-9999", count=2, network_gbit_per_s=25.0)
PAIR = Cluster(name="box", nodes=(KNOWN, NEW))


def says(**told) -> str:
    """Return a program that prints this answer, after some noise."""
    return f"print('noise'); print({_MARK + json.dumps(told)!r})"


def runs(program: str) -> Run:
    """Return a runner that runs this Python program instead, and checks the node."""

    def run(
        node: Node, module: str, argument: str, limit_s: float
    ) -> subprocess.CompletedProcess[str]:
        assert node == NEW, node
        command = [sys.executable, "-S", "-c", program]
        return subprocess.run(command, capture_output=True, text=True, timeout=limit_s)

    return run


def test_only_what_nobody_knows_is_measured_by_a_process_with_its_devices(
    tmp_path: Path,
):
    seen = Node(name="x", device="RTX-9999", count=2, precision="float16", **FIGURES)
    answer = cluster_toml(Cluster(name="local", nodes=(seen,)))
    run = runs(says(cluster=answer, warnings=["RTX-9999: measured"]))
    with pytest.warns(UserWarning, match="RTX-9999: measured"):
        old, new = as_found_apart(PAIR, run, tmp_path).nodes
    assert old == KNOWN
    assert (new.name, new.count, new.precision) == ("new", 2, "float16")
    assert new.peak_tflops == FIGURES["peak_tflops"]
    assert new.network_gbit_per_s == 25.0  # as given


@pytest.mark.parametrize(
    ("program", "limit_s", "why"),
    [
        ("import time; time.sleep(60)", 0.3, "in 0.3 s"),
        ("raise SystemExit('no luck')", 30.0, "no luck"),
        (
            says(cluster=cluster_toml(Cluster(name="x", nodes=(KNOWN,))), warnings=[]),
            30.0,
            "sees T4",
        ),
        (says(error={"got": "a bus", "allowed": "x", "fix": "y"}), 30.0, "a bus"),
    ],
)
def test_what_cannot_be_measured_is_bad_input(program, limit_s, why, tmp_path: Path):
    with pytest.raises(BadInput, match=why):
        as_found_apart(PAIR, runs(program), tmp_path, limit_s)


def test_the_process_tells_what_it_has(tmp_path: Path):
    run = run_here({"old": {"JAX_NUM_CPU_DEVICES": "3"}})
    told = _answer(KNOWN, run(KNOWN, MODULE, str(tmp_path), 120.0))
    assert told["warnings"] == []
    assert 'device = "cpu"' in told["cluster"] and "count = 3" in told["cluster"]


def test_a_machine_that_has_not_joined_cannot_be_measured(tmp_path: Path):
    run = by_joining.run_on_nodes(PAIR, None)
    with pytest.raises(BadInput, match="node 'new' with the unknown device 'RTX-9999'"):
        as_found_apart(PAIR, run, tmp_path)
