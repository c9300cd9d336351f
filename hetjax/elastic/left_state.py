# SPDX-License-Identifier: Apache-2.0
"""What is left of a run's state: in memory, on disks, in the store.

Owns where is looked for it, which depends on the kind of recovery. Does not own asking
(`hetjax/runtime/control/recovery.py`) nor what is done with it (`driver.py`).
"""

from collections.abc import Sequence

from hetjax.checkpoint.recovery_plan import PartialSnapshot
from hetjax.checkpoint.stored_steps import in_store
from hetjax.elastic.terms import Terms
from hetjax.runtime.control import recovery
from hetjax.runtime.control.controller import Controller


class LeftState:
    """The parts of saves that workers of the controller, or the store, have."""

    def __init__(self, controller: Controller, terms: Terms) -> None:
        self._controller, self._terms = controller, terms

    def held(self, workers: Sequence[str]) -> list[PartialSnapshot]:
        """In memory and on the disks of these workers; memory is kept from now on."""
        if self._terms.recovery == "cloud-only":
            return []
        return [*recovery.in_memory(self._controller, workers), *self.on_disk(workers)]

    def on_disk(self, workers: Sequence[str]) -> list[PartialSnapshot]:
        if self._terms.recovery == "cloud-only":
            return []
        connections = self._controller.connections
        return recovery.on_disk(connections, workers, self._terms.storage)

    def found(self) -> list[PartialSnapshot]:
        """What an earlier start has left on disks and in the store."""
        storage = self._terms.storage
        stored = in_store(storage.store(), storage.key())
        found = [*self.on_disk(self._controller.workers), *stored]
        self._terms.check_found(found)
        return found
