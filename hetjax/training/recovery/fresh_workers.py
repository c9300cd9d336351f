# SPDX-License-Identifier: Apache-2.0
"""Workers that have nothing yet: to be started, built, given programs.

Owns which of a run's workers these are, and what each of them needs before state can
come. Does not own who is lost (`driver.py`), starting (`hetjax/launchers/`), nor what a
worker is built from (`current_plan.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hetjax.launchers.launcher import Launcher
from hetjax.runtime.control.controller import Controller
from hetjax.training.recovery.driver_config import DriverConfig
from hetjax.training.recovery.recovered import Clock


class FreshWorkers:
    """All of the controller's to begin with; `gone` are those of this recovery."""

    def __init__(
        self, controller: Controller, launcher: Launcher, config: DriverConfig
    ) -> None:
        self._controller, self._launcher, self._config = controller, launcher, config
        self._never_built = set(controller.workers)  # started, or to be
        self._unbuilt = set(controller.workers)  # for the plan of now
        self.gone = set[str]()

    def add(self, workers: Iterable[str]) -> None:
        """Take these for ones that were started, or are to be, and have no state."""
        for waiting in (self._never_built, self._unbuilt, self.gone):
            waiting.update(workers)

    def add_other_plan(self) -> None:
        """All go by another plan now."""
        self._unbuilt.update(self._controller.workers)

    def built_before(self, workers: Iterable[str]) -> list[str]:
        """Those of these that were built, for whatever plan."""
        return [worker for worker in workers if worker not in self._never_built]

    def start(
        self,
        gone: Sequence[str],
        settings: Mapping[str, Any],
        clock: Clock,
        is_first: bool,
    ) -> None:
        """Start those that are gone; build them, and all others with another plan.

        They compile beside what follows, unless it is to be seen first whether there is
        memory enough.
        """
        self.add(gone)
        there = self._controller.connections.workers  # a start may have called since
        self._launcher.start([worker for worker in gone if worker not in there])
        if gone and is_first:
            self._config.context.on_workers_started(gone)
        clock.lap("start")
        building = [w for w in self._controller.workers if w in self._unbuilt]
        self._controller.build(settings, building, compiles=not is_first)
        self._never_built.clear()
        self._unbuilt.clear()
        clock.lap("build")
