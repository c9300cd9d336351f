# SPDX-License-Identifier: Apache-2.0
"""What a run on workers goes by: who makes what, where state is, what is checked.

Owns these values. Does not own what is done by them (`driver.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.cluster.cluster import Cluster
from hetjax.elastic.loss_scaling import LossScaling
from hetjax.elastic.membership import Membership
from hetjax.elastic.standby_plans import StandbyPlans
from hetjax.elastic.step_checking import StepChecking
from hetjax.plans.plan import Plan
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.rpc.schema import TransportName


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What workers are built with, and where their checkpoints are.

    `settings` are for a cluster and a plan, `standby_plans` gives a plan for a
    cluster in place of another plan; `compile` lets workers compile theirs.
    """

    settings: Callable[[Cluster, Plan], Mapping[str, Any]]
    loss_scaling: LossScaling
    checking: StepChecking
    standby_plans: StandbyPlans
    membership: Membership
    compile: Callable[[Controller, Cluster], None]
    transport: TransportName
    seed: int
    storage: CheckpointStorage
    host: Mapping[str, Any]
    recovery: Literal["local-first", "cloud-only", "none"]

    @property
    def recovers(self) -> bool:
        return self.recovery != "none"
