# SPDX-License-Identifier: Apache-2.0
"""Which gradients leave the devices of a worker: only those that others hold, too."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hetjax.comm.reduction import Rows, row_sharding
from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.plans.worker_map import WorkerMap
from hetjax.runtime.execution.gradient_sync import PeerSync

CUTS = {"a": (0, 2), "b": (2, 3)}  # layers


def plan() -> Plan:
    """Two replicas, whose first stages are on node a and whose last ones on node b."""
    replicas = tuple(
        Replica(
            num_microbatches=1,
            microbatch_size=1,
            stages=tuple(
                Stage(
                    node=node,
                    devices=(at,),
                    layers=cut,
                    launch_ahead=1,
                )
                for node, cut in CUTS.items()
            ),
        )
        for at in range(2)
    )
    return Plan(model="m", seq_len=1, global_batch=2, replicas=replicas)


class HostWork:
    """A pool that takes note of what the host is to do, and does not do it."""

    def __init__(self) -> None:
        self.asked = 0

    def run(self, work: Any) -> None:
        self.asked += 1


def rows_on(device: int, values: np.ndarray) -> Rows:
    mesh = Mesh(np.array(jax.devices()[device]).reshape(1, 1), ("tensor", "data"))
    return (jax.device_put(values[None], row_sharding(mesh)),)


def sums_of(holders: tuple[tuple[int, int], ...]) -> tuple[HostWork, list[Rows | None]]:
    """What worker a's two stages get for a group of these holders."""
    pool, peers, group = HostWork(), SimpleNamespace(own="a"), CUTS["a"]
    sync: Any = PeerSync(
        peers,  # pyright: ignore[reportArgumentType]
        pool,  # pyright: ignore[reportArgumentType]
        {group: holders},
        WorkerMap(plan()),
        at=(0, 0),
        num_tokens=2,
        wire=np.dtype(np.float32),
        losses=dict,
    )
    own = [(0, 0), (1, 0)]
    for stage in own:
        sync.post(
            group, stage, rows_on(stage[0], np.array([1.0, 2.0]) * (stage[0] + 1))
        )
    return pool, [sync.summed(group, stage) for stage in own]


def test_a_group_that_one_worker_holds_is_added_by_its_devices():
    pool, sums = sums_of(((0, 0), (1, 0)))
    for device, summed in enumerate(sums):
        assert summed is not None
        np.testing.assert_array_equal(summed[0], [[3.0, 6.0]])
        assert summed[0].devices() == {jax.devices()[device]}
    assert pool.asked == 0


def test_a_group_that_another_worker_holds_too_is_added_by_hosts():
    pool, sums = sums_of(((0, 0), (1, 0), (1, 1)))
    assert sums == [None, None]
    assert pool.asked == 1
