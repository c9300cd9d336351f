# SPDX-License-Identifier: Apache-2.0
"""Defines a stage on its devices: programs, and the arrays that outlive a step.

Owns the choice of these arrays, and when the weights to evaluate are computed. Does not
own the programs (`programs.py`, `update.py`) nor when they run (`executor.py`).
"""

from dataclasses import dataclass, field
from typing import Any

from hetjax.plans.plan import Group
from hetjax.runtime.execution.checking.check_programs import CheckPrograms
from hetjax.runtime.execution.programs import StagePrograms
from hetjax.runtime.execution.updates.update import UpdatePrograms


@dataclass(slots=True)
class StageState:
    """One stage on its devices: programs, and the arrays that outlive a step.

    `is_finite` says whether the masters after UPDATE are finite; None if not yet known.
    `evaluated` are the weights to evaluate, if they are not `params` and were requested
    since UPDATE.
    """

    programs: StagePrograms
    updates: UpdatePrograms
    checks: CheckPrograms
    masters: Any = None
    frozen: Any = None
    opt_state: Any = None
    params: Any = None
    evaluated: Any = None
    acc: Any = None
    loss: Any = None
    loss_scale: Any = None
    is_finite: Any = None
    gradients: dict[Group, Any] = field(default_factory=dict)

    def evaluation_params(self) -> Any:
        """Return the compute weights to evaluate.

        If they are not the trained ones, they stay until the next step needs their
        memory for its gradient sums, which are at least as large.
        """
        if not self.updates.evaluates_elsewhere:
            return self.params
        if self.evaluated is None:
            self.evaluated = self.updates.evaluated(
                self.masters, self.opt_state, self.frozen
            )
        return self.evaluated

    def skip(self) -> None:
        """Skip the update; the finite check reruns next step."""
        self.opt_state, self.is_finite = self.updates.skipped(self.opt_state), None

    def clear(self) -> None:
        """Drop all arrays."""
        self.masters = self.opt_state = self.params = self.frozen = None
        self.evaluated = self.is_finite = None
        self.drop_step()

    def drop_step(self) -> None:
        """Drop the results of a step so far."""
        self.acc = self.loss = None
        self.gradients.clear()
