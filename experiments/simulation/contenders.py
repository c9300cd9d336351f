# SPDX-License-Identifier: Apache-2.0
"""Lets several processes compete for one lease while some of them stop or die.

Runs the real leases (`leases/lease.py`) in simulated time: each process takes the
lease, commits as workers do, and releases it. Raises Violation if a commit remains that
its process made after another process had taken over. Owns these small runs. Does not
own whole runs (`run.py`), which have one controller at a time.
"""

import warnings
from contextlib import ExitStack
from functools import partial

from experiments.simulation.object_store import Bucket, SimStore
from experiments.simulation.storage import leases_in
from experiments.simulation.threads import Threads
from experiments.simulation.world import Process, Violation, World
from hetjax.checkpoint.leases.lease import Lease, LeaseHeld, LeaseLost, acquire

_ENDS_S = 3000.0
_MOST_TRIES = 20


class Contenders:
    """The processes of a seed, and what they did under which lease."""

    def __init__(self, seed: int) -> None:
        self.world = world = World(seed)
        self._threads, self._folder = Threads(world), Bucket(world, self._hear)
        self.taken_s: dict[int, float] = {}  # when each lease number was taken
        self.landed_s: dict[str, float] = {}  # when each commit appeared
        self.num_lost = self.num_done = 0
        self._disturbed, self._killed = set[Process](), set[str]()
        self._holders: dict[int, str] = {}
        hosts = ["a", "b", "c"][: world.random.randint(2, 3)]
        self._processes = [Process(world, host, f"{host}#1") for host in hosts]

    def run(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(self._threads.in_place())
            stack.enter_context(leases_in(self._threads, self._folder))
            stack.callback(self.world.end)
            for process in self._processes:
                self._threads.processes.add(process)
                at_s = self.world.random.uniform(0.0, 20.0)
                process.after(at_s, partial(self._begin, process))
            self.world.run_until(lambda: False, _ENDS_S)
        self._check_end()

    def _hear(self, name: str) -> None:
        if name in self._folder.objects:
            self.landed_s[name] = self.world.now_s

    def _begin(self, process: Process) -> None:
        process.begin(partial(self._work, process))
        chance = self.world.random
        for _ in range(chance.choice([0, 1, 2])):
            at_s, for_s = chance.uniform(0.0, 200.0), chance.uniform(1.0, 150.0)
            self.world.after(at_s, partial(self._stop, process))
            self.world.after(at_s + for_s, process.go_on)
        if chance.random() < 0.2:
            self.world.after(chance.uniform(0.0, 200.0), partial(self._kill, process))

    def _stop_soon(self, process: Process) -> None:
        """Stop the process, perhaps between its look at the lease and its commit."""
        at_s, for_s = (
            self.world.random.uniform(*s) for s in ((0.0, 0.3), (1.0, 150.0))
        )
        self.world.after(at_s, partial(self._stop, process))
        self.world.after(at_s + for_s, process.go_on)

    def _stop(self, process: Process) -> None:
        self._disturbed.add(process)
        process.stop()

    def _kill(self, process: Process) -> None:
        self._disturbed.add(process)
        self._killed.add(process.name)
        process.kill()

    def _work(self, process: Process) -> None:
        for _ in range(_MOST_TRIES):
            try:
                with acquire(SimStore(self._folder), "it") as lease:
                    return self._commit_often(lease)
            except LeaseHeld:
                self._threads.sleep(self.world.random.uniform(5.0, 60.0))
            except LeaseLost as lost:
                self.num_lost += 1
                if process not in self._disturbed:
                    self.world.wrong = Violation(f"{process.name} lost it: {lost.got}")
                return

    def _commit_often(self, lease: Lease) -> None:
        number, chance = lease.number, self.world.random
        if number in self.taken_s:
            self.world.wrong = Violation(f"two have lease {number}")
        self.taken_s[number] = self.world.now_s
        self._holders[number] = self._threads.process.name
        for count in range(chance.randint(1, 30)):
            self._threads.sleep(chance.uniform(0.0, 10.0))
            lease.check_seen()
            self._commit(lease, f"commit/{number}-{count}")
        self.num_done += 1

    def _commit(self, lease: Lease, name: str) -> None:
        """Commit like the writer of manifests (`hetjax/checkpoint/writer.py`)."""
        store = SimStore(self._folder)
        if self.world.one_in(20):
            self._stop_soon(self._threads.process)
        with lease.fence.around(partial(store.remove, [name])):
            store.put_text(name, str(lease.number))

    def _check_end(self) -> None:
        for name in [n for n in self._folder.objects if n.startswith("commit/")]:
            number = int(name.removeprefix("commit/").partition("-")[0])
            later_s = [s for other, s in self.taken_s.items() if other > number]
            is_late = self.landed_s[name] > min(later_s, default=_ENDS_S)
            if is_late and self._holders[number] not in self._killed:
                raise Violation(f"{name} stays, though another had taken over")
        undisturbed = [p for p in self._processes if p not in self._disturbed]
        if self.num_done < len(undisturbed):
            raise Violation("one that nothing stood in the way of never had its turn")


def contend(seed: int) -> Contenders:
    """Run one seed. Raises Violation if an invariant is broken."""
    found = Contenders(seed)
    found.run()
    return found
