# SPDX-License-Identifier: Apache-2.0
"""Defines the settings of a driver: how the run recovers, and what it asks of the run.

Does not own the driver itself (`driver.py`) nor the run's answers
(`training/driver_setup.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hetjax.checkpoint.recovery_plan import PartialSnapshot
from hetjax.checkpoint.run_identity import RunIdentity
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.cluster.cluster import Cluster
from hetjax.plans.plan import Plan
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.control.recovery_decisions import Restored
from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.rpc.schema import TransportName
from hetjax.training.recovery.loss_scaling import LossScaling
from hetjax.training.recovery.membership import Membership
from hetjax.training.recovery.standby_plans import StandbyPlans
from hetjax.training.recovery.step_checking import StepChecking


class RunContext(Protocol):
    """What a driver asks of the run that it drives."""

    def worker_settings(self, cluster: Cluster, plan: Plan) -> Mapping[str, Any]:
        """Return the settings from which workers are built, as JSON values."""
        ...

    def compile(
        self, controller: Controller, cluster: Cluster, *, is_first: bool
    ) -> None:
        """Let workers compile their programs.

        Raises NoFeasiblePlan if the first programs do not fit into memory.
        """
        ...

    def on_workers_started(self, workers: Sequence[str]) -> None:
        """Called once, with the workers that the run begins with."""

    def on_places(
        self, places: Mapping[str, str], storage: CheckpointStorage, num_nodes: int
    ) -> None:
        """Called with the folders of workers that do not see the run's directory, and
        with the number of nodes that train.

        Called again when these change.
        """

    def identify(self, found: Sequence[PartialSnapshot]) -> RunIdentity | None:
        """Return the run's identity, judged by the saves found in its storage.

        None keeps the identity of the storage. Raises BadInput if it is ambiguous.
        """
        return None

    def check_begins(
        self, found: Sequence[PartialSnapshot], asked: Sequence[str], step: int | None
    ) -> None:
        """Raise BadInput if the run must not begin from `step` (None: anew).

        `found` are its saves, `asked` the workers that have reported theirs.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverConfig:
    """How a run recovers, and where its checkpoints are.

    A run that `reroutes` does not wait for a lost worker if others can go on. A run
    that `compiles_ahead` lets workers compile the plan that it moves to while they
    train. `host` has the values of each checkpoint besides its arrays.
    """

    context: RunContext
    loss_scaling: LossScaling
    checking: StepChecking
    standby_plans: StandbyPlans
    membership: Membership
    transport: TransportName
    seed: int
    storage: CheckpointStorage
    host: Mapping[str, Any]
    recovery: Literal["local-first", "cloud-only", "none"]
    reroutes: bool = False
    compiles_ahead: bool = False

    def on_step(self, step: int, commit: StepCommit) -> None:
        """Update loss scale and checks after a committed step."""
        self.loss_scaling.on_step(step, commit)
        self.checking.on_step(step, commit)

    def on_restored(self, restored: Restored) -> None:
        """Update loss scale and checks for a restored state: forget later steps."""
        self.loss_scaling.on_restored(restored)
        self.checking.on_restored(restored)

    @property
    def recovers(self) -> bool:
        return self.recovery != "none"
