# SPDX-License-Identifier: Apache-2.0
"""What is left of a run's state: in memory, on disks, in the store.

Owns where is looked for it, which depends on the kind of recovery, and that nothing of
another run is among it. Does not own asking (`hetjax/runtime/control/recovery.py`),
which run this is (`hetjax/training/identity.py`), nor what is done with it
(`driver.py`).
"""

from collections.abc import Sequence
from dataclasses import replace

from hetjax.checkpoint.recovery_plan import PartialSnapshot
from hetjax.checkpoint.run_identity import is_ours
from hetjax.checkpoint.stored_steps import in_store
from hetjax.elastic.terms import Terms
from hetjax.runtime.control import recovery
from hetjax.runtime.control.controller import Controller


class LeftState:
    """The parts of the run's saves that workers of the controller, or the store, have.

    `storage` is where they are, of the run that this is found to be.
    """

    def __init__(self, controller: Controller, terms: Terms) -> None:
        self._controller, self._terms = controller, terms
        self.storage = terms.storage

    def held(self, workers: Sequence[str]) -> list[PartialSnapshot]:
        """In memory and on the disks of these workers; memory is kept from now on."""
        if self._terms.recovery == "cloud-only":
            return []
        return [*recovery.in_memory(self._controller, workers), *self.on_disk(workers)]

    def on_disk(self, workers: Sequence[str]) -> list[PartialSnapshot]:
        return [one for one in self._on_disk(workers) if self._is_ours(one)]

    def found(self) -> list[PartialSnapshot]:
        """What an earlier start has left on disks and in the store.

        Settles which run this is; raises BadInput where that is not clear.
        """
        stored = in_store(self.storage.store(), self.storage.key())
        held = self._on_disk(self._controller.workers)
        run = self._terms.identify([*held, *stored])
        if run is not None and run != self.storage.run:
            self.storage = replace(self.storage, run=run)
            held = self._on_disk(self._controller.workers)  # they read its saves alone
            self._controller.new_attempts.begin(run.after + self.storage.number)
        return [one for one in (*held, *stored) if self._is_ours(one)]

    def _on_disk(self, workers: Sequence[str]) -> list[PartialSnapshot]:
        if self._terms.recovery == "cloud-only":
            return []
        return recovery.on_disk(self._controller.connections, workers, self.storage)

    def _is_ours(self, one: PartialSnapshot) -> bool:
        return one.is_trusted and is_ours(self.storage.run, one.run)
