# SPDX-License-Identifier: Apache-2.0
"""Draws faults of a store, some of them together with faults of its users' machines.

Owns these kinds of faults and how often they are drawn. Does not own the other faults
(`faults.py`), nor their effects on calls (`object_store.py`).
"""

from collections.abc import Callable
from functools import partial

from experiments.simulation.faults import FAULTS_S, LAST_S, Faults
from experiments.simulation.object_store import spoilt
from experiments.simulation.stored import Stored

_MEAN_S = 15.0
_LONG_S = 100.0  # longer than the limit of a call


class StoreFaults:
    """The faults of a run's store; they are counted with the others."""

    def __init__(self, stored: Stored, faults: Faults) -> None:
        self._stored, self._faults = stored, faults
        self._bucket, self._world = stored.bucket, stored.bucket.world

    def spread(self) -> None:
        """Draw some faults, all before FAULTS_S."""
        chance = self._world.random
        self._world.after(FAULTS_S, self._end)
        for _ in range(chance.choice([0, 1, 2, 4])):
            kind = chance.choice(_KINDS)
            at_s = min(LAST_S, chance.expovariate(1 / _MEAN_S))
            self._world.after(at_s, lambda kind=kind: self._strike(kind))

    def _end(self) -> None:
        bucket = self._bucket
        bucket.away_until_s = min(bucket.away_until_s, self._world.now_s)
        bucket.slowness, bucket.refuses_one_in = 1.0, 0.0

    def _strike(self, kind: Callable[["StoreFaults"], None]) -> None:
        name = kind.__name__.strip("_")
        self._world.tell(f"fault: {name}")
        self._faults.counts[name] += 1
        kind(self)

    def _lose_store(self) -> None:
        """Let the store stop answering for a while."""
        now_s = self._world.now_s
        away_s = self._world.random.uniform(1.0, _LONG_S)
        self._bucket.away_until_s = now_s + away_s
        self._bucket.trouble(now_s + away_s)

    def _refuse_store(self) -> None:
        self._bucket.refuses_one_in = self._world.random.choice([1.0, 3.0, 10.0])
        self._for_a_while(lambda: setattr(self._bucket, "refuses_one_in", 0.0))

    def _slow_store(self) -> None:
        self._bucket.slowness = self._world.random.choice([10.0, 100.0, 1000.0])
        self._for_a_while(lambda: setattr(self._bucket, "slowness", 1.0))

    def _for_a_while(self, then: Callable[[], None]) -> None:
        self._world.after(self._world.random.uniform(5.0, 60.0), then)

    def _damage_store(self) -> None:
        """Damage an object of a checkpoint."""
        names = [name for name in self._bucket.objects if name.startswith("step_")]
        if names:
            name = self._world.random.choice(sorted(names))
            self._bucket.objects[name] = spoilt(self._bucket.objects[name])
            self._bucket.trouble(1e9)
            self._stored.is_damaged = True

    def _lose_machine(self) -> None:
        """Take a machine and its disk away: its data are in the store, or lost."""
        self._faults.go_in_time(self._faults._some_host())

    def _lose_machines(self) -> None:
        """Take all machines and their disks away, one after another."""
        for node in self._faults.machines.cluster.nodes:
            delay_s = self._world.random.uniform(0.0, 60.0)
            go = partial(self._faults.go_in_time, node.name)
            self._world.after(delay_s, go)

    def _lose_both(self) -> None:
        self._lose_store()
        self._lose_machine()

    def _crash_as_it_goes(self) -> None:
        """Crash the controller while the store is away."""
        self._lose_store()
        self._faults._crash_controller()


_KINDS = [
    *[StoreFaults._lose_store] * 3,
    *[StoreFaults._refuse_store] * 2,
    *[StoreFaults._slow_store] * 2,
    StoreFaults._damage_store,
    *[StoreFaults._lose_machine] * 2,
    *[StoreFaults._lose_machines] * 2,
    *[StoreFaults._lose_both] * 2,
    StoreFaults._crash_as_it_goes,
]
