# SPDX-License-Identifier: Apache-2.0
"""What REDUCE and NORM mean when the stages live in several processes.

Owns the meeting points of one step as one worker sees them: sums are made on the host,
by threads, while the devices go on computing. Does not own the sum over processes
(`hetjax/comm/exchange.py`) nor the meeting of stages in one process
(`gradient_sync.py`).
"""

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np

from hetjax.comm.connections import Key
from hetjax.comm.exchange import total
from hetjax.comm.peers import Peers
from hetjax.comm.reduction import Rows, from_host, to_host
from hetjax.comm.wire import SQUARES, SUMS, HostWorkPool
from hetjax.mesh.spanning import to_mesh, value_here
from hetjax.plans.worker_map import WorkerMap
from hetjax.runtime.execution.outcome import StepCommit
from hetjax.schedule.programs.action import Group, StageKey

_SHARE = struct.Struct("<IId?d")  # replica, stage, squares, whether last, its loss


class PeerSync:
    """Meeting points of one training step, for the stages of one worker.

    `holders` are the stages that hold each group, `members` the workers of each stage,
    `at` (epoch, step) names this meeting to peers; gradients travel between workers in
    dtype `wire`. `losses` gives those of the last stages here, read at NORM: they are
    ready then. What is there is told of by the mailbox of `peers`.
    """

    def __init__(
        self,
        peers: Peers,
        pool: HostWorkPool,
        holders: Mapping[Group, Sequence[StageKey]],
        members: WorkerMap,
        *,
        at: tuple[int, int],
        num_tokens: int,
        wire: np.dtype,
        losses: Callable[[], Mapping[StageKey, jax.Array]],
    ) -> None:
        self._losses = losses
        self._wire = wire
        self._peers, self._pool = peers, pool
        self._holders, self._members = holders, members
        self._number = {group: at for at, group in enumerate(holders)}
        self._at, self._num_tokens = at, num_tokens
        self._posted: dict[Group, dict[StageKey, Rows]] = {}
        self._sums: dict[tuple[Group, StageKey], Rows] = {}
        self._squares: dict[StageKey, jax.Array] = {}
        self._like: dict[tuple[Group, StageKey], tuple[jax.ShapeDtypeStruct, ...]] = {}
        self._given_up = False
        self.commit: StepCommit | None = None

    def give_up(self) -> None:
        """Sum nothing any more; all sums are there at once and have no value (NaN)."""
        self._given_up = True

    def post(self, group: Group, stage: StageKey, rows: Rows) -> None:
        """Contribute; the last holder here to post starts the sum."""
        self._like[group, stage] = tuple(map(_abstract, rows))
        if self._given_up:
            return
        posted = self._posted.setdefault(group, {})
        posted[stage] = rows
        if posted.keys() == self._own(self._holders[group]):
            for array in rows:
                array.copy_to_host_async()
            del self._posted[group]
            self._pool.run(lambda: self._sum(group, posted))

    def summed(self, group: Group, stage: StageKey) -> Rows | None:
        """The group's sum for this holder, or None while a holder is missing."""
        if not self._given_up:
            return self._sums.get((group, stage))
        like = self._like.get((group, stage))
        return None if like is None else tuple(map(_no_value, like))

    def post_squares(self, stage: StageKey, squares: jax.Array) -> None:
        """Contribute the squared norm of the groups that the stage owns."""
        self._squares[stage] = squares
        if self._given_up:
            return
        if self._squares.keys() == self._own(self._members.members):
            squares.copy_to_host_async()
            self.attend()

    def attend(self) -> None:
        """Start to learn the norm: all stages here, if there are any, have posted."""
        self._pool.run(self._exchange_squares)

    def settle(self, commit: StepCommit) -> None:
        """Take what the step has come to from a worker that knows it."""
        self.commit = commit

    def _own(self, stages: Iterable[StageKey]) -> set[StageKey]:
        own, members = self._peers.own, self._members.members
        return {stage for stage in stages if own in members[stage]}

    def _sum(self, group: Group, posted: Mapping[StageKey, Rows]) -> None:
        """Sum the rows that are here, those that the same workers have at a time."""
        holders, some = self._holders[group], next(iter(posted.values()))
        num_rows = len(some) * some[0].shape[0]
        shares = self._members.shares(holders, num_rows)
        found: np.ndarray | None = None
        for number, (workers, rows) in enumerate(shares):
            if self._peers.own not in workers:
                continue
            ours = [h for h, w in zip(holders, workers, strict=True) if self._is_us(w)]
            added = self._added([posted[holder] for holder in ours], rows)
            key: Key = (*self._at, SUMS, self._number[group], number, 0)
            summed = self._over(tuple(dict.fromkeys(workers)), key, added)
            if len(shares) == 1:
                found = summed
                break
            if found is None:
                found = np.empty((num_rows, *summed.shape[1:]), summed.dtype)
            found[list(rows)] = summed
        assert found is not None, "a group's sum was posted where nobody holds it"
        for stage, rows in posted.items():
            self._sums[group, stage] = from_host(found, rows)
        self._peers.mailbox.touch()

    def _is_us(self, worker: str) -> bool:
        return worker == self._peers.own

    def _added(
        self, contributions: Sequence[Rows], wanted: Sequence[int]
    ) -> np.ndarray:
        """These rows of what is here, in the order of the stages."""
        found = to_host(contributions[0], wanted)
        for rows in contributions[1:]:
            found = found + to_host(rows, wanted)
        return found

    def _over(self, workers: Sequence[str], key: Key, rows: np.ndarray) -> np.ndarray:
        """The sum over workers, the same bits for each."""
        if len(workers) == 1:
            return rows
        flat = total(self._peers, workers, key, rows.reshape(-1), self._wire)
        return flat.reshape(rows.shape)

    def _exchange_squares(self) -> None:
        """Tell all workers our stages' squares; all add them in the same order.

        Their losses, too: a worker that is lost after NORM takes none along.
        """
        key: Key = (*self._at, SQUARES, 0, 0, 0)
        losses = {s: float(value_here(loss)) for s, loss in self._losses().items()}
        own = b"".join(
            _SHARE.pack(
                *stage,
                float(value_here(self._squares[stage])),
                stage in losses,
                losses.get(stage, 0.0),
            )
            for stage in sorted(self._squares)
            if self._is_us(self._members.leader(stage))
        )
        telling = dict.fromkeys(map(self._members.leader, self._members.members))
        for worker in self._members.workers if own else ():
            if not self._is_us(worker):
                self._peers.send(worker, key, [np.frombuffer(own, np.uint8)])
        found = {
            (replica, stage): share
            for worker in telling
            for replica, stage, *share in _SHARE.iter_unpack(
                own
                if self._is_us(worker)
                else self._peers.mailbox.take(worker, key).tobytes()
            )
        }
        ordered = sorted(found)
        self.commit = StepCommit(
            squares=float(np.sum([found[stage][0] for stage in ordered])),
            losses=tuple((s, found[s][2]) for s in ordered if found[s][1]),
            num_tokens=self._num_tokens,
        )
        self._peers.mailbox.touch()


def _abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _no_value(like: jax.ShapeDtypeStruct) -> jax.Array:
    return to_mesh(np.full(like.shape, np.nan, like.dtype), like.sharding)
