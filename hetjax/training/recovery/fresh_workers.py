# SPDX-License-Identifier: Apache-2.0
"""Starts and builds the workers of a run that have no state yet.

Owns which workers these are, and what each of them needs before it can get state. Does
not own the losses (`driver.py`), the processes (`hetjax/launchers/`), nor what a worker
is built from (`current_plan.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hetjax.launchers.launcher import Launcher
from hetjax.runtime.control.controller import Controller
from hetjax.training.recovery.driver_config import DriverConfig
from hetjax.training.recovery.recovered import Clock


class FreshWorkers:
    """Workers without state: at first all of the controller's.

    `started` holds those started in this recovery.
    """

    def __init__(
        self, controller: Controller, launcher: Launcher, config: DriverConfig
    ) -> None:
        self._controller, self._launcher, self._config = controller, launcher, config
        self._never_built = set(controller.workers)  # started, or to be started
        self._unbuilt = set(controller.workers)  # for the current plan
        self.started = set[str]()

    def add(self, workers: Iterable[str]) -> None:
        """Add workers that were started, or are to be started, and have no state."""
        for waiting in (self._never_built, self._unbuilt, self.started):
            waiting.update(workers)

    def add_other_plan(self) -> None:
        """Mark all workers as not yet built for the current plan."""
        self._unbuilt.update(self._controller.workers)

    def built_before(self, workers: Iterable[str]) -> list[str]:
        """Return those of these workers that were built, for whatever plan."""
        return [worker for worker in workers if worker not in self._never_built]

    def start(
        self,
        gone: Sequence[str],
        settings: Mapping[str, Any],
        clock: Clock,
        is_first: bool,
    ) -> None:
        """Start workers that are gone; build all that the current plan needs built.

        They compile in the background, unless `is_first`: the run then compiles in the
        foreground, to check first whether the programs fit into memory.
        """
        self.add(gone)
        there = self._controller.connections.workers  # some may have connected since
        self._launcher.start([worker for worker in gone if worker not in there])
        if gone and is_first:
            self._config.context.on_workers_started(gone)
        clock.lap("start")
        building = [w for w in self._controller.workers if w in self._unbuilt]
        self._controller.build(settings, building, compiles=not is_first)
        self._never_built.clear()
        self._unbuilt.clear()
        clock.lap("build")
