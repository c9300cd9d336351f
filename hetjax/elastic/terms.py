# SPDX-License-Identifier: Apache-2.0
"""What a run's driver is told once, by whoever starts the run.

Does not own what is done with it (`driver.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hetjax.checkpoint.recovery_plan import PartialSnapshot
from hetjax.checkpoint.run_identity import RunIdentity
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.cluster.cluster import Cluster
from hetjax.elastic.loss_scaling import LossScaling
from hetjax.elastic.membership import Membership
from hetjax.elastic.standby_plans import StandbyPlans
from hetjax.elastic.step_checking import StepChecking
from hetjax.plans.plan import Plan
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.control.recovery_decisions import Restored
from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.rpc.schema import TransportName

Identify = Callable[[Sequence[PartialSnapshot]], RunIdentity | None]
CheckBegins = Callable[[Sequence[PartialSnapshot], Sequence[str], int | None], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What workers are built with, and where their checkpoints are.

    `settings` are for a cluster and a plan, `standby_plans` gives a plan for a
    cluster in place of another plan; `compile` lets workers compile theirs, for the
    first time if so. A run that `reroutes` does not wait for a lost worker where others
    can go on. When the run begins `heard_started` is told who was started, and
    `identify` sees what was saved earlier, in `storage`: it tells which run that makes
    this (None: it is not asked), or raises BadInput. `check_begins` sees what is of
    that run, and which workers were asked, and from which step they go on. It may raise
    BadInput if that is None: no step is whole.
    """

    settings: Callable[[Cluster, Plan], Mapping[str, Any]]
    loss_scaling: LossScaling
    checking: StepChecking
    standby_plans: StandbyPlans
    membership: Membership
    compile: Callable[[Controller, Cluster, bool], None]
    transport: TransportName
    seed: int
    storage: CheckpointStorage
    host: Mapping[str, Any]
    recovery: Literal["local-first", "cloud-only", "none"]
    reroutes: bool = False
    heard_started: Callable[[Sequence[str]], None] = lambda workers: None
    identify: Identify = lambda found: None
    check_begins: CheckBegins = lambda found, asked, step: None

    def hear(self, step: int, commit: StepCommit) -> None:
        """Take in what a step has come to."""
        self.loss_scaling.hear(step, commit)
        self.checking.hear(step, commit)

    def go_on(self, restored: Restored) -> None:
        """Go on from a state, and forget what came after it."""
        self.loss_scaling.go_on(restored)
        self.checking.go_on(restored)

    @property
    def recovers(self) -> bool:
        return self.recovery != "none"
