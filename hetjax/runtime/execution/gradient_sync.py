# SPDX-License-Identifier: Apache-2.0
"""Implements REDUCE and NORM: sums gradients over stages, and agrees on the commit.

Owns the exchange between stages: in one process devices add; between processes hosts
add, while the devices continue. A stage posts and continues; results are available once
every holder has posted. Does not own the arithmetic of a group's sum
(`hetjax/comm/reduction.py`) nor the commit of a step (`commit.py`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set

import jax
import numpy as np

from hetjax.comm.connections import Key
from hetjax.comm.host_sum import added
from hetjax.comm.peers import Peers
from hetjax.comm.reduction import Rows, exchange, from_host, to_host, total
from hetjax.comm.transport import Tally
from hetjax.comm.wire import SQUARES, SUMS, HostWorkPool, no_value
from hetjax.mesh.host_copies import start_copy
from hetjax.mesh.multihost import value_here
from hetjax.plans.plan import Group, StageKey
from hetjax.plans.worker_map import WorkerMap
from hetjax.runtime.execution.checking.checks import (
    StepChecks,
    disagreements,
)
from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.execution.shares import (
    HostShare,
    StageShare,
    packed_shares,
    unpacked_shares,
)


class GradientSync(ABC):
    """The exchange of one training step, for the stages of one worker.

    Gradients are multiplied by `loss_scale`, if there is one. `holders` are the stages
    that hold each group. `losses` returns those of this worker's last stages; it is
    called at NORM, when they are ready. All calls return at once except `commit`, which
    may wait for the devices of stages that have posted.
    """

    def __init__(
        self,
        holders: Mapping[Group, Sequence[StageKey]],
        num_tokens: int,
        losses: Callable[[], Mapping[StageKey, jax.Array]],
        loss_scale: float | None,
        checks: StepChecks,
    ) -> None:
        self._holders, self._num_tokens, self._losses = holders, num_tokens, losses
        self._loss_scale, self._checks = loss_scale, checks
        self._posted: dict[Group, dict[StageKey, Rows]] = {}
        self._sums: dict[tuple[Group, StageKey], Rows] = {}
        self._shares: dict[StageKey, StageShare] = {}
        self._commit: StepCommit | None = None

    def post(self, group: Group, stage: StageKey, rows: Rows) -> None:
        """Contribute packed gradients; the last holder here to post starts the sum."""
        posted = self._posted.setdefault(group, {})
        posted[stage] = rows
        if posted.keys() == self._here(self._holders[group]):
            self._start_sum(group, self._posted.pop(group))

    def is_shared(self, group: Group) -> bool:
        """Return whether several stages hold the group and so sum it."""
        return len(self._holders[group]) > 1

    def summed(self, group: Group, stage: StageKey) -> Rows | None:
        """Return the group's sum for this holder, or None while a holder is missing."""
        return self._sums.get((group, stage))

    def post_share(self, stage: StageKey, share: StageShare) -> None:
        """Contribute the stage's share at NORM."""
        self._shares[stage] = share

    @property
    def commit(self) -> StepCommit | None:
        """The outcome of the step, or None while a stage of the plan is missing."""
        return self._commit

    def settle(self, commit: StepCommit) -> None:
        """Adopt the commit from a worker that knows it."""
        self._commit = commit

    def _come_to(
        self, shares: Mapping[StageKey, HostShare], losses: Mapping[StageKey, float]
    ) -> StepCommit:
        """Return the commit of all stages, added in their order."""
        ordered = [shares[stage].squares for stage in sorted(shares)]
        scale = self._loss_scale or 1.0
        found = float(np.sum(ordered, dtype=np.float64)) / scale**2
        return StepCommit(
            # NaN would never compare equal to the NaN of other workers
            squares=math.inf if math.isnan(found) else found,
            losses=tuple((stage, float(losses[stage])) for stage in sorted(losses)),
            num_tokens=self._num_tokens,
            loss_scale=self._loss_scale,
            most_loss=self._checks.most_loss,
            skips_spikes=self._checks.skips_spikes,
            is_finite=all(share.is_finite for share in shares.values()),
            disagreements=disagreements({s: t.digests for s, t in shares.items()}),
        )

    @abstractmethod
    def attend(self) -> None:
        """Take part without any stage."""

    @abstractmethod
    def _here(self, stages: Sequence[StageKey]) -> Set[StageKey]:
        """Return the stages that this worker has."""

    @abstractmethod
    def _start_sum(self, group: Group, posted: Mapping[StageKey, Rows]) -> None: ...


class LocalSync(GradientSync):
    """The exchange if one process has all `num_stages` stages of the plan.

    `sent` counts the bytes that devices send each other, by (from stage, to stage).
    """

    def __init__(
        self,
        holders: Mapping[Group, Sequence[StageKey]],
        num_stages: int,
        num_tokens: int,
        losses: Callable[[], Mapping[StageKey, jax.Array]],
        loss_scale: float | None,
        checks: StepChecks,
    ) -> None:
        super().__init__(holders, num_tokens, losses, loss_scale, checks)
        self._num_stages, self.sent = num_stages, Tally()

    @property
    def commit(self) -> StepCommit | None:
        """The outcome; waits for the devices once all stages have posted."""
        if self._commit is None and len(self._shares) == self._num_stages:
            losses = jax.device_get(self._losses())
            shares = {stage: share.read() for stage, share in self._shares.items()}
            self._commit = self._come_to(shares, losses)
        return self._commit

    def attend(self) -> None:
        """Do nothing: no other worker waits."""

    def _here(self, stages: Sequence[StageKey]) -> Set[StageKey]:
        return set(stages)

    def _start_sum(self, group: Group, posted: Mapping[StageKey, Rows]) -> None:
        holders = self._holders[group]

        def moved(a: int, b: int, num_bytes: int) -> None:
            self.sent.add((holders[a], holders[b]), SUMS, num_bytes)

        totals = exchange([posted[holder] for holder in holders], moved)
        for holder, summed in zip(holders, totals, strict=True):
            self._sums[group, holder] = summed


class PeerSync(GradientSync):
    """The exchange between connected workers.

    `members` are the workers of each stage. `at`, (epoch, step), identifies this
    exchange to peers. Gradients travel between workers in dtype `wire`. The mailbox of
    `peers` wakes those who wait for results.
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
        loss_scale: float | None,
        checks: StepChecks,
    ) -> None:
        super().__init__(holders, num_tokens, losses, loss_scale, checks)
        self._peers, self._pool, self._members = peers, pool, members
        self._number = {group: at for at, group in enumerate(holders)}
        self._at, self._wire = at, wire
        self._like: dict[tuple[Group, StageKey], tuple[jax.ShapeDtypeStruct, ...]] = {}
        self._given_up = False

    def give_up(self) -> None:
        """Stop summing; all sums are there at once, and are NaN."""
        self._given_up = True

    def post(self, group: Group, stage: StageKey, rows: Rows) -> None:
        self._like[group, stage] = tuple(map(_abstract, rows))
        if not self._given_up:
            super().post(group, stage, rows)

    def summed(self, group: Group, stage: StageKey) -> Rows | None:
        if not self._given_up:
            return super().summed(group, stage)
        like = self._like.get((group, stage))
        return None if like is None else tuple(map(no_value, like))

    def post_share(self, stage: StageKey, share: StageShare) -> None:
        super().post_share(stage, share)
        if self._given_up:
            return
        if self._shares.keys() == self._here([*self._members.members]):
            self.attend()

    def attend(self) -> None:
        """Start to exchange shares: all stages here, if there are any, have posted."""
        self._pool.run(self._exchange_shares)

    def _here(self, stages: Sequence[StageKey]) -> Set[StageKey]:
        own, members = self._peers.own, self._members.members
        return {stage for stage in stages if own in members[stage]}

    def _start_sum(self, group: Group, posted: Mapping[StageKey, Rows]) -> None:
        there = {stage: tuple(map(start_copy, rows)) for stage, rows in posted.items()}
        self._pool.run(lambda: self._sum(group, posted, there))

    def _sum(
        self,
        group: Group,
        posted: Mapping[StageKey, Rows],
        there: Mapping[StageKey, Rows],
    ) -> None:
        """Sum the rows that are here, one share of `WorkerMap.shares` at a time."""
        own, holders = self._peers.own, self._holders[group]
        some = next(iter(posted.values()))
        num_rows = len(some) * some[0].shape[0]
        shares = self._members.shares(holders, num_rows)
        found: np.ndarray | None = None
        for number, (workers, rows) in enumerate(shares):
            if own not in workers:
                continue
            ours = [h for h, w in zip(holders, workers, strict=True) if w == own]
            first, *others = (to_host(there[holder], rows) for holder in ours)
            mine = first
            if others:
                flat = [each.reshape(-1) for each in (first, *others)]
                mine = added(flat).reshape(first.shape)
            key: Key = (*self._at, SUMS, self._number[group], number, 0)
            summed = self._over(tuple(dict.fromkeys(workers)), key, mine)
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

    def _over(self, workers: Sequence[str], key: Key, rows: np.ndarray) -> np.ndarray:
        """Return the sum over workers, the same bits for each.

        The hosts add in all cases. Workers that are processes of one JAX world could
        instead sum on their devices, by one program on a mesh of all of them, which XLA
        runs by NCCL. This is the place to distinguish the two.
        """
        if len(workers) == 1:
            return rows
        flat = total(self._peers, workers, key, rows.reshape(-1), self._wire)
        return flat.reshape(rows.shape)

    def _exchange_shares(self) -> None:
        """Send this worker's shares to all workers; all add them in the same order.

        Losses travel, too, so that a worker lost after NORM takes none along.
        """
        key: Key = (*self._at, SQUARES, 0, 0, 0)
        peers, leader = self._peers, self._members.leader
        losses = {s: float(value_here(loss)) for s, loss in self._losses().items()}
        mine = {
            stage: share.read()
            for stage, share in self._shares.items()
            if leader(stage) == peers.own
        }
        own = packed_shares(mine, losses, self._number)
        for worker in self._members.workers if own else ():
            if worker != peers.own:
                peers.send(worker, key, [np.frombuffer(own, np.uint8)])
        packed = [
            own if worker == peers.own else peers.mailbox.receive(worker, key).tobytes()
            for worker in dict.fromkeys(map(leader, self._members.members))
        ]
        shares, of_last = unpacked_shares(packed, [*self._holders])
        self._commit = self._come_to(shares, of_last)
        peers.mailbox.touch()


def _abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
