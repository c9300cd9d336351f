# SPDX-License-Identifier: Apache-2.0
"""Which worker has which part of a plan, on nodes with several hosts."""

import math

import jax
import numpy as np
import pytest

from hetjax.comm.reduction import row_sharding
from hetjax.mesh.axes import stage_mesh
from hetjax.mesh.reshard import shard_boxes
from hetjax.plans.worker_map import WorkerMap
from tests.runtime.spanning_plans import CASES, NODES, SLICE, WORKERS, spanning_case


def members(case: str) -> WorkerMap:
    return WorkerMap(spanning_case(case).plan, NODES)


def test_a_node_has_a_worker_per_host_and_one_host_has_its_name():
    assert SLICE.workers == ("slice/0", "slice/1")
    assert WORKERS[-1] == "single"
    plan = spanning_case("data").plan
    assert WorkerMap(plan).workers == ("slice", "single")  # no hosts given
    for case in CASES:
        nodes = {stage.node for _, _, stage in spanning_case(case).plan.stages()}
        expected = {w for w in WORKERS if w.partition("/")[0] in nodes}
        assert set(members(case).workers) == expected


def test_members_are_in_host_order_and_the_first_one_leads():
    assert members("hosts").members == {(0, 0): ("slice/0",), (0, 1): ("slice/1",)}
    found = members("replicas")
    assert found.members[0, 0] == ("slice/0", "slice/1")
    assert found.leader((0, 0)) == "slice/0"
    assert found.within("single") == {(1, 0), (1, 1)}
    assert not found.within("slice/0")


def test_data_ranks_are_where_their_devices_are():
    assert members("data").ranks[0, 0] == (("slice/0",), ("slice/1",))
    assert members("replicas").ranks[0, 0] == (
        ("slice/0", "slice/1"),
        ("slice/1", "slice/0"),
    )


@pytest.mark.parametrize("case", CASES)
def test_rows_of_a_group_are_with_those_whose_devices_hold_them(case: str):
    """Against the layout that JAX gives the rows on the stage's mesh."""
    found, plan = members(case), spanning_case(case).plan
    stages = {(r, s): stage for r, s, stage in plan.stages()}
    rows = math.lcm(*(len(stage.devices) for stage in stages.values()))
    owners: dict[int, list[str]] = {row: [] for row in range(rows)}
    for stage in stages.values():
        devices = jax.devices()[: len(stage.devices)]
        mesh = stage_mesh(devices, data=stage.mesh.data, tensor=stage.mesh.tensor)
        shape = (len(devices), 1)
        for device, ((row, _), _) in shard_boxes(row_sharding(mesh), shape).items():
            index = stage.devices[devices.index(device)]
            per_device = rows // len(devices)
            for own in range(row * per_device, (row + 1) * per_device):
                owners[own].append(found.worker_of(stage.node, index))
    shares = found.shares(list(stages), rows)
    assert sorted(np.concatenate([own for _, own in shares])) == list(range(rows))
    for workers, own in shares:
        for row in own:
            assert owners[row] == list(workers)
