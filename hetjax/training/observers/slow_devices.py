# SPDX-License-Identifier: Apache-2.0
"""Watches how long a run's stages take, to report and keep what is slow.

Owns which steps are timed, when the detector starts anew, and what is kept for the next
plan. Does not own the detector (`hetjax/costs/slowness/`), the timing
(`runtime/execution/step_clock.py`), nor the messages (`training/recorder.py`).
"""

import math
import os
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from pathlib import Path

from hetjax.cluster.catalogue import canonical_name
from hetjax.cluster.cluster import Cluster, Node
from hetjax.costs.slowness.detector import Detector
from hetjax.costs.slowness.findings import Slowdown
from hetjax.costs.slowness.known import Slowness, slowness, write_slowness
from hetjax.costs.slowness.step_times import StepTimes, lanes_of
from hetjax.plans.plan import Plan
from hetjax.runtime.control.step_timing import StepTiming
from hetjax.training.settings.config import RunConfig

_MOST_SHARE = 0.01  # of a step's time that watching may cost
_FIRST, _MOST_SHARE_OF_FIRST = 4, 0.03  # a plan's first steps are compared
# CPU time to watch an action, on a machine with five times as much work as cores:
# `experiments/stragglers/cost.py`
_ACTION_S = 100e-6
_OF_THE_NODE = {"name", "device", "count", "hosts", "zone", "spot", "speeds"}
_OF_THE_NODE |= {"price_per_hour", "preemptions_per_hour"}
_ACTIONS_OF_A_PASS = 2  # the pass itself, and what it receives


def watches(config: RunConfig) -> bool:
    """Return whether the run's steps are timed.

    Simulated devices share one machine's cores with everything else that runs there: if
    one of them is slow, the cause is not a device.
    """
    if config.watch_speeds == "auto":
        return not config.simulate
    return config.watch_speeds == "on"


@dataclass(kw_only=True)
class SlowDevices:
    """Finds what is slow from the times of steps.

    Calls `changed` when the next plan should be another one. `timing` has the times
    that workers report; the file `path` has what is slow at present.
    """

    is_on: bool = False
    is_one_process: bool = False  # one process has all nodes
    path: Path = Path(os.devnull)
    timing: StepTiming = field(default_factory=StepTiming)
    changed: Callable[[], None] = lambda: None
    _detector: Detector = field(default_factory=Detector)
    _every: int = 1
    _num_actions: int = 0
    _num_steps: int = 0  # of this plan

    def begin(self, plan: Plan, cluster: Cluster) -> None:
        """Watch the steps of a plan from here on."""
        kinds = {node.name: _kind(node) for node in cluster.nodes}
        self._detector.begin(lanes_of(plan, kinds))
        by_node = _actions_by_node(plan).values()
        self._num_actions = sum(by_node) if self.is_one_process else max(by_node)
        self._every, self._num_steps = 1, 0

    def resume(self) -> None:
        """Leave out the next steps, unusual after a recovery by the same plan."""
        self._detector.leave_out_some()

    def before(self, step: int) -> None:
        """Have this step timed, if due: timing may cost a hundredth of the time, and a
        little more in the first steps of a plan."""
        self.timing.is_wanted = self.is_on and step % self._every == 0

    def after(self, step_time_s: float, times: StepTimes | None) -> list[Slowdown]:
        """Take a step's duration, and the times of an earlier step that came with it.

        Return the new findings: what has become slow, or is as before.
        """
        self._num_steps += 1
        share = _MOST_SHARE if self._num_steps > _FIRST else _MOST_SHARE_OF_FIRST
        self._every = max(1, math.ceil(self.timing_cost_s / (share * step_time_s)))
        return [] if times is None else self.add(times)

    def add(self, times: StepTimes) -> list[Slowdown]:
        """Take the times of a step; return the new findings."""
        found = self._detector.add(times)
        if found:
            self._keep()
            self.changed()
        return found

    @property
    def timing_cost_s(self) -> float:
        """CPU seconds that timing a step costs a worker, at most."""
        return self._num_actions * _ACTION_S

    @property
    def known(self) -> Slowness:
        """What is slow at present."""
        return slowness(self._detector.slow_nodes, self._detector.slow_links)

    def _keep(self) -> None:
        """Write what is slow for the next plan; a full disk must not end the run."""
        try:
            write_slowness(self.path, self.known)
        except OSError as error:
            warnings.warn(
                f"cannot record what is slow: {error.strerror}; the next plan ignores "
                "it",
                stacklevel=2,
            )


def _kind(node: Node) -> Hashable:
    """Return what equal devices share: their kind and their cluster file's figures."""
    figures = (f for f in fields(Node) if f.name not in _OF_THE_NODE)
    return canonical_name(node.device), *(getattr(node, f.name) for f in figures)


def _actions_by_node(plan: Plan) -> dict[str, int]:
    """Return how many actions are watched in a step, by node."""
    by_node: dict[str, int] = {}
    for r, _, stage in plan.stages():
        passes = 2 * plan.replicas[r].num_microbatches
        by_node[stage.node] = (
            by_node.get(stage.node, 0) + passes * _ACTIONS_OF_A_PASS + 2
        )
    return by_node
