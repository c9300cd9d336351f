# SPDX-License-Identifier: Apache-2.0
"""Finds the parts of a run's state that survived: in memory, on disks, in the store.

Owns which of these places to search (the kind of recovery decides), the check that no
part belongs to another run, and the refusal of newcomers whose disk holds another run.
Does not own the requests to workers (`hetjax/runtime/control/recovery.py`), the run's
identity (`hetjax/training/directory/identity.py`), nor the use of the parts
(`driver.py`).
"""

import warnings
from collections.abc import Callable, Collection, Sequence
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
from hetjax.runtime.control.gathering import OnBegin, gather
from hetjax.training.recovery.driver_config import DriverConfig


class SurvivingState:
    """The parts of the run's saves that the controller's workers, or the store, have.

    `storage` is where they are, with the run's identity once that is known. `leave`
    lets the run go on without a node; it returns False if the run cannot.
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
        """Return the folder of each worker that does not see the run's directory."""
        return {worker: place for worker, place in self._places.items() if place}

    def held(self, workers: Sequence[str]) -> list[PartialSnapshot]:
        """Return the parts in memory and on disks of these workers.

        The workers hold their memory's state from now on.
        """
        if self._config.recovery == "cloud-only":
            return []
        return [*recovery.in_memory(self._controller, workers), *self.on_disk(workers)]

    def on_disk(self, workers: Sequence[str]) -> list[PartialSnapshot]:
        """Return the parts on these workers' disks; none if only the store counts."""
        if self._config.recovery == "cloud-only":
            return []
        return [one for one in self._on_disk(workers) if self._is_ours(one)]

    def joining(self, workers: Sequence[str]) -> list[PartialSnapshot]:
        """Return the parts on the disks of workers that join a run under way.

        If another run uses a worker's disk, or has saved on it, warn and go on without
        the worker's node. Raises BadInput if the run cannot.
        """
        self._unasked -= {*workers}
        before = self.places()
        found, refused = self._asked(workers)
        if self.places() != before:
            self._report_places()
        for one in found:
            if not self._is_ours(one):
                refused.setdefault(one.worker, self._has_saves_of_another(one))
        for worker, why in refused.items():
            if not self._leave(node_of(worker)):
                raise why
            self._unasked.add(worker)
            text = f"continuing without node {node_of(worker)}: {why.got}"
            warnings.warn(text, stacklevel=2)
        kept = found if self._config.recovery != "cloud-only" else []
        return [one for one in kept if self._is_ours(one)]

    def found(self) -> list[PartialSnapshot]:
        """Return what an earlier start has left on disks and in the store.

        Determine which run this is. Raises BadInput if that is ambiguous.
        """
        stored = in_store(self.storage.store(), self.storage.key())
        held = self._on_disk(self._controller.workers)
        run = self._config.context.identify([*held, *stored])
        if run is not None and run != self.storage.run:
            self._storage = replace(self._storage, run=run)
            held = self._on_disk(self._controller.workers)  # now of this run alone
            self._controller.new_attempts.begin(run.after + self.storage.number)
        self._report_places()
        if self._config.recovery == "cloud-only":
            held = []  # needed only to identify the run and to refuse others
        return [one for one in (*held, *stored) if self._is_ours(one)]

    def _report_places(self) -> None:
        num_nodes = len({node_of(worker) for worker in self._controller.workers})
        self._config.context.on_places(self.places(), self.storage, num_nodes)

    def gather(self, step: int, also: Collection[int], on_begin: OnBegin) -> int:
        """Copy a step here from workers that do not see the run's directory.

        Arguments, result and errors are those of `runtime/control/gathering.py`.
        """
        controller, apart = self._controller, self.places()
        workers = [worker for worker in controller.workers if worker in apart]
        connections = controller.connections
        return gather(connections, workers, self.storage, step, also, on_begin)

    def _asked(
        self, workers: Sequence[str]
    ) -> tuple[list[PartialSnapshot], dict[str, BadInput]]:
        """Return what these workers have, and the errors of the others, by worker."""
        with suppress(BadInput):  # then ask each alone, to see which one has an error
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
            fix="remove that run's step_* folders there, or restart this run with "
            "another --checkpoint.local",
        )

    def _on_disk(self, workers: Sequence[str]) -> list[PartialSnapshot]:
        asked = [worker for worker in workers if worker not in self._unasked]
        connections = self._controller.connections
        return recovery.on_disk(connections, asked, self.storage, self._places)

    def _is_ours(self, one: PartialSnapshot) -> bool:
        return one.is_trusted and is_ours(self.storage.run, one.run)
