# SPDX-License-Identifier: Apache-2.0
"""What REDUCE and NORM mean when the stages live in several processes.

Owns the meeting points of one step as one worker sees them: sums are made on the host,
by threads, while the devices go on computing. Does not own the sum over processes
(`hetjax/mesh/exchange.py`) nor the meeting of stages in one process
(`collectives.py`).
"""

import struct
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from hetjax.mesh.exchange import total
from hetjax.mesh.links import Key
from hetjax.mesh.peers import Peers
from hetjax.mesh.reduction import Rows, from_host, to_host
from hetjax.mesh.wire import SQUARES, SUMS, Ship
from hetjax.schedule.action import Group, StageKey

_SQUARE = struct.Struct("<IId")  # replica, stage, value


class Meeting:
    """Meeting points of one training step, for the stages of one worker.

    `holders` are the stages that hold each group, `nodes` the worker of each stage;
    gradients travel between workers in dtype `wire`.
    What is there is told of by the mailbox of `peers`.
    """

    def __init__(
        self,
        peers: Peers,
        ship: Ship,
        holders: Mapping[Group, Sequence[StageKey]],
        nodes: Mapping[StageKey, str],
        *,
        generation: int,
        step: int,
        wire: np.dtype,
    ) -> None:
        self._wire = wire
        self._peers, self._ship = peers, ship
        self._holders, self._nodes = holders, nodes
        self._number = {group: at for at, group in enumerate(holders)}
        self._at = generation, step
        self._posted: dict[Group, dict[StageKey, Rows]] = {}
        self._sums: dict[tuple[Group, StageKey], Rows] = {}
        self._squares: dict[StageKey, jax.Array] = {}
        self._total: float | None = None

    def post(self, group: Group, stage: StageKey, rows: Rows) -> None:
        """Contribute; the last holder here to post starts the sum."""
        posted = self._posted.setdefault(group, {})
        posted[stage] = rows
        if posted.keys() == self._own(self._holders[group]):
            for array in rows:
                array.copy_to_host_async()
            del self._posted[group]
            self._ship.run(lambda: self._sum(group, posted))

    def summed(self, group: Group, stage: StageKey) -> Rows | None:
        """The group's sum for this holder, or None while a holder is missing."""
        return self._sums.get((group, stage))

    def post_squares(self, stage: StageKey, squares: jax.Array) -> None:
        """Contribute the squared norm of the groups that the stage owns."""
        self._squares[stage] = squares
        if self._squares.keys() == self._own(self._nodes):
            squares.copy_to_host_async()
            self._ship.run(self._exchange_squares)

    def squares(self) -> float | None:
        """The sum over all stages of the plan, or None while one is missing."""
        return self._total

    def _own(self, stages: Iterable[StageKey]) -> set[StageKey]:
        return {stage for stage in stages if self._nodes[stage] == self._peers.own}

    def _sum(self, group: Group, posted: Mapping[StageKey, Rows]) -> None:
        """Add what is here in stage order, then over the workers; lay it out again."""
        ordered = [posted[stage] for stage in sorted(posted)]
        found = to_host(ordered[0])
        for rows in ordered[1:]:
            found = found + to_host(rows)
        workers = list(dict.fromkeys(self._nodes[s] for s in self._holders[group]))
        if len(workers) > 1:
            key: Key = (*self._at, SUMS, self._number[group], 0, 0)
            flat = total(self._peers, workers, key, found.reshape(-1), self._wire)
            found = flat.reshape(found.shape)
        for stage, rows in posted.items():
            self._sums[group, stage] = from_host(found, rows)
        self._peers.mailbox.touch()

    def _exchange_squares(self) -> None:
        """Tell all workers our stages' squares; all add them in the same order."""
        key: Key = (*self._at, SQUARES, 0, 0, 0)
        own = b"".join(
            _SQUARE.pack(*stage, float(self._squares[stage]))
            for stage in sorted(self._squares)
        )
        everyone = dict.fromkeys(self._nodes.values())
        for worker in everyone:
            if worker != self._peers.own:
                self._peers.send(worker, key, [np.frombuffer(own, np.uint8)])
        found = {
            (replica, stage): value
            for worker in everyone
            for replica, stage, value in _SQUARE.iter_unpack(
                own
                if worker == self._peers.own
                else self._peers.mailbox.take(worker, key).tobytes()
            )
        }
        self._total = float(np.sum([found[stage] for stage in sorted(found)]))
        self._peers.mailbox.touch()
