# SPDX-License-Identifier: Apache-2.0
"""What is left of a run's state: in memory, on disks, in the store.

Owns where is looked for it, which depends on the kind of recovery, and that nothing of
another run is among it, and which newcomers cannot stay as their disk is another run's.
Does not own asking (`hetjax/runtime/control/recovery.py`),
which run this is (`hetjax/training/directory/identity.py`), nor what is done with it
(`driver.py`).
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from hetjax.checkpoint.recovery_plan import PartialSnapshot
from hetjax.checkpoint.run_identity import is_ours, named
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.checkpoint.stored_steps import in_store
from hetjax.errors import BadInput
from hetjax.plans.worker_map import node_of
from hetjax.runtime.control import recovery
from hetjax.runtime.control.controller import Controller
from hetjax.training.recovery.driver_config import DriverConfig


class SurvivingState:
    """The parts of the run's saves that workers of the controller, or the store, have.

    `storage` is where they are, of the run that this is found to be. `leave` lets the
    run go on without a node; False if it cannot.
    """

    def __init__(
        self, controller: Controller, config: DriverConfig, leave: Callable[[str], bool]
    ) -> None:
        self._controller, self._config, self._leave = controller, config, leave
        self._storage, self._places = config.storage, dict[str, str]()
        self._unasked: set[str] = set()  # workers whose disk is another run's

    @property
    def storage(self) -> CheckpointStorage:
        return self._storage.apart() if self.places() else self._storage

    def places(self) -> dict[str, str]:
        """By worker the folder of those who do not see the run's directory."""
        return {worker: place for worker, place in self._places.items() if place}

    def held(self, workers: Sequence[str]) -> list[PartialSnapshot]:
        """In memory and on the disks of these workers; memory is kept from now on."""
        if self._config.recovery == "cloud-only":
            return []
        return [*recovery.in_memory(self._controller, workers), *self.on_disk(workers)]

    def on_disk(self, workers: Sequence[str]) -> list[PartialSnapshot]:
        """On the disks of these workers; nothing where the store alone counts."""
        if self._config.recovery == "cloud-only":
            return []
        return [one for one in self._on_disk(workers) if self._is_ours(one)]

    def joining(self, workers: Sequence[str]) -> list[PartialSnapshot]:
        """On the disks of workers that come to a run that goes on.

        It goes on without the node of one whose disk another run uses or has saved on,
        with a warning; raises BadInput if it cannot.
        """
        self._unasked -= {*workers}
        before = self.places()
        found, refused = self._asked(workers)
        if self.places() != before:
            self._config.context.on_places(self.places(), self.storage)
        for one in found:
            if not self._is_ours(one):
                refused.setdefault(one.worker, self._has_saves_of_another(one))
        for worker, why in refused.items():
            if not self._leave(node_of(worker)):
                raise why
            self._unasked.add(worker)
            text = f"going on without node {node_of(worker)}: {why.got}"
            warnings.warn(text, stacklevel=2)
        kept = found if self._config.recovery != "cloud-only" else []
        return [one for one in kept if self._is_ours(one)]

    def found(self) -> list[PartialSnapshot]:
        """What an earlier start has left on disks and in the store.

        Settles which run this is; raises BadInput where that is not clear.
        """
        stored = in_store(self.storage.store(), self.storage.key())
        held = self._on_disk(self._controller.workers)
        run = self._config.context.identify([*held, *stored])
        if run is not None and run != self.storage.run:
            self._storage = replace(self._storage, run=run)
            held = self._on_disk(self._controller.workers)  # they read its saves alone
            self._controller.new_attempts.begin(run.after + self.storage.number)
        self._config.context.on_places(self.places(), self.storage)
        if self._config.recovery == "cloud-only":
            held = []  # they were asked whose they are, and to keep others out
        return [one for one in (*held, *stored) if self._is_ours(one)]

    def _asked(
        self, workers: Sequence[str]
    ) -> tuple[list[PartialSnapshot], dict[str, BadInput]]:
        """What these workers have, and why some do not say so, by worker."""
        with suppress(BadInput):  # then each by itself, to see whose it is
            return self._on_disk(workers), {}
        found, refused = list[PartialSnapshot](), dict[str, BadInput]()
        for worker in workers:
            try:
                found += self._on_disk([worker])
            except BadInput as why:
                refused[worker] = why
        return found, refused

    def _has_saves_of_another(self, one: PartialSnapshot) -> BadInput:
        return BadInput(
            got=f"the checkpoint folder of {one.worker}, {self.storage.directory}, "
            f"holds step {one.save[0]} of {named(one.run)}",
            allowed="a folder that is empty, or holds this run's checkpoints",
            fix="remove that run's step_* folders there, or start the node where it "
            "has another --checkpoint.local",
        )

    def _on_disk(self, workers: Sequence[str]) -> list[PartialSnapshot]:
        asked = [worker for worker in workers if worker not in self._unasked]
        connections = self._controller.connections
        return recovery.on_disk(connections, asked, self.storage, self._places)

    def _is_ours(self, one: PartialSnapshot) -> bool:
        return one.is_trusted and is_ours(self.storage.run, one.run)
