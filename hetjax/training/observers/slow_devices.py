# SPDX-License-Identifier: Apache-2.0
"""A run watches how long its stages take: who is slow, which is reported and kept.

Owns which steps are timed, when the detector begins anew, and what is kept for the next
plan. Does not own the detector (`hetjax/costs/slowness/`), who measures
(`runtime/execution/step_clock.py`), nor the words of a run (`training/recorder.py`).
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

_MOST_SHARE = 0.01  # of a step, that watching may cost
# CPU time for an action, on a machine with five times as much to do as it has cores:
# `experiments/stragglers/cost.py`
_ACTION_S = 100e-6
_OF_THE_NODE = {"name", "device", "count", "hosts", "zone", "spot", "speeds"}
_OF_THE_NODE |= {"price_per_hour", "preemptions_per_hour"}
_ACTIONS_OF_A_PASS = 2  # the pass itself, and what it receives


def watches(config: RunConfig) -> bool:
    """Whether the run's steps are timed.

    Simulated devices share the cores of one machine, with whatever else runs there:
    what makes one of them slow is no device.
    """
    if config.watch_speeds == "auto":
        return not config.simulate
    return config.watch_speeds == "on"


@dataclass(kw_only=True)
class SlowDevices:
    """Takes the times of steps; `changed` is called when the next plan should be
    another.

    `timing` has what workers tell, `path` is where what is slow is kept while it is.
    """

    is_on: bool = False
    is_one_process: bool = False  # which has all nodes
    path: Path = Path(os.devnull)
    timing: StepTiming = field(default_factory=StepTiming)
    changed: Callable[[], None] = lambda: None
    _detector: Detector = field(default_factory=Detector)
    _every: int = 1
    _num_actions: int = 0

    def begin(self, plan: Plan, cluster: Cluster) -> None:
        """Watch the steps of a plan from here on."""
        kinds = {node.name: _kind(node) for node in cluster.nodes}
        self._detector.begin(lanes_of(plan, kinds))
        by_node = _actions_by_node(plan).values()
        self._num_actions = sum(by_node) if self.is_one_process else max(by_node)
        self._every = 1

    def resume(self) -> None:
        """After a recovery by the same plan: the next steps are not like others."""
        self._detector.leave_out_some()

    def before(self, step: int) -> None:
        """Let this step be timed: each, where that costs less than a hundredth."""
        self.timing.is_wanted = self.is_on and step % self._every == 0

    def after(self, step_time_s: float) -> list[Slowdown]:
        """Take how long a step took all in all, and what came with it of an earlier
        one; return what is clear by now and was not before."""
        cost_s = self._num_actions * _ACTION_S
        self._every = max(1, math.ceil(cost_s / (_MOST_SHARE * step_time_s)))
        times = self.timing.pop_times()
        return [] if times is None else self.add(times)

    def add(self, times: StepTimes) -> list[Slowdown]:
        """Take the times of a step."""
        found = self._detector.add(times)
        if found:
            self._keep()
            self.changed()
        return found

    @property
    def known(self) -> Slowness:
        """What is slow by now."""
        return slowness(self._detector.slow_nodes, self._detector.slow_links)

    def _keep(self) -> None:
        """Keep it for the next plan; a full disk is no reason to end."""
        try:
            write_slowness(self.path, self.known)
        except OSError as error:
            warnings.warn(
                f"what is slow is not kept: {error.strerror}; the next plan does not "
                "count it",
                stacklevel=2,
            )


def _kind(node: Node) -> Hashable:
    """What makes devices equal: their kind, and what the cluster file says of them."""
    figures = (f for f in fields(Node) if f.name not in _OF_THE_NODE)
    return canonical_name(node.device), *(getattr(node, f.name) for f in figures)


def _actions_by_node(plan: Plan) -> dict[str, int]:
    """How many actions are watched in a step."""
    by_node: dict[str, int] = {}
    for r, _, stage in plan.stages():
        passes = 2 * plan.replicas[r].num_microbatches
        by_node[stage.node] = (
            by_node.get(stage.node, 0) + passes * _ACTIONS_OF_A_PASS + 2
        )
    return by_node
