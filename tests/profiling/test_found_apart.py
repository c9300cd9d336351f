# SPDX-License-Identifier: Apache-2.0
"""Kinds that nobody knows are measured by processes that see only their own devices."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hetjax.cluster.cluster import DEVICE_FIGURES, Cluster, Node
from hetjax.cluster.cluster_files import cluster_toml
from hetjax.errors import BadInput
from hetjax.profiling.found_apart import _COMMAND, _MARK, _told, as_found_apart

FIGURES: dict[str, Any] = {key: 10.0 + i for i, key in enumerate(DEVICE_FIGURES)}
KNOWN = Node(name="old", device="T4", count=1)
NEW = Node(name="new", device="RTX-9999", count=2, network_gbit_per_s=25.0)
PAIR = Cluster(name="box", nodes=(KNOWN, NEW))
WORKERS = {"old": {"CUDA_VISIBLE_DEVICES": "0"}, "new": {"CUDA_VISIBLE_DEVICES": "1,2"}}


def says(**told) -> tuple[str, ...]:
    """A process that gives this answer, after some noise; to the right worker only."""
    line = _MARK + json.dumps(told)
    program = (
        "import os; print('noise'); assert os.environ['CUDA_VISIBLE_DEVICES'] == '1,2'"
        f"; print({line!r})"
    )
    return sys.executable, "-S", "-c", program


def test_only_what_nobody_knows_is_measured_by_a_process_with_its_devices(
    tmp_path: Path,
):
    seen = Node(name="x", device="RTX-9999", count=2, precision="float16", **FIGURES)
    answer = cluster_toml(Cluster(name="local", nodes=(seen,)))
    command = says(cluster=answer, warnings=["RTX-9999: measured"])
    with pytest.warns(UserWarning, match="RTX-9999: measured"):
        old, new = as_found_apart(PAIR, WORKERS, tmp_path, command).nodes
    assert old == KNOWN
    assert (new.name, new.count, new.precision) == ("new", 2, "float16")
    assert new.peak_tflops == FIGURES["peak_tflops"]
    assert new.network_gbit_per_s == 25.0  # as it was said


@pytest.mark.parametrize(
    ("command", "limit_s", "why"),
    [
        ((sys.executable, "-c", "import time; time.sleep(60)"), 0.3, "in 0.3 s"),
        ((sys.executable, "-c", "raise SystemExit('no luck')"), 30.0, "no luck"),
        (
            says(cluster=cluster_toml(Cluster(name="x", nodes=(KNOWN,))), warnings=[]),
            30.0,
            "sees T4",
        ),
        (says(error={"got": "a bus", "allowed": "x", "fix": "y"}), 30.0, "a bus"),
    ],
)
def test_what_cannot_be_measured_is_bad_input(command, limit_s, why, tmp_path: Path):
    with pytest.raises(BadInput, match=why):
        as_found_apart(PAIR, WORKERS, tmp_path, command, limit_s)


def test_the_process_tells_what_it_has(tmp_path: Path):
    told = _told(KNOWN, {"JAX_NUM_CPU_DEVICES": "3"}, (*_COMMAND, str(tmp_path)), 120.0)
    assert told["warnings"] == []
    assert 'device = "cpu"' in told["cluster"] and "count = 3" in told["cluster"]
