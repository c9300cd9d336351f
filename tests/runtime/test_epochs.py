# SPDX-License-Identifier: Apache-2.0
"""The epoch grows with every new connection of the workers."""

from types import SimpleNamespace
from typing import Any, cast

from hetjax.plans.plan import Plan, Replica, Stage
from hetjax.runtime.control.controller import Controller


def test_each_time_workers_are_connected_is_of_another_epoch():
    stage = Stage(node="n", devices=(0,), layers=(0, 1), launch_ahead=1)
    replica = Replica(num_microbatches=1, microbatch_size=1, stages=(stage,))
    plan = Plan(model="m", seq_len=8, global_batch=1, replicas=(replica,))
    connections = SimpleNamespace(epoch=0, only="embedded")  # one worker has no peers
    controller = Controller(plan, cast(Any, connections))
    for epoch in (1, 2, 3):
        controller.connect()
        assert connections.epoch == epoch
