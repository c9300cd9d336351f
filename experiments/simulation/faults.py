# SPDX-License-Identifier: Apache-2.0
"""Draws the faults of a run from its seed.

Owns the kinds of faults, how often they are drawn, and when they end: after that, a run
must finish. Does not own their effects on connections and disks.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from experiments.simulation.network import Network
from experiments.simulation.ports import CONTROLLER, Machines
from experiments.simulation.worker import SimWorker
from experiments.simulation.world import World
from hetjax.runtime.rpc import schema

FAULTS_S = 150.0  # no fault is active from then on
LAST_S = FAULTS_S - 1.0  # time of the last fault
# How many processes each of these faults ends at most; other faults may end any number
ENDS_AT_MOST = {
    "kill": 1,
    "kill_two": 2,
    "kill_soon_after": 2,
    "stop": 1,
    "get_stuck": 1,
    "fail_to_start": 3,
    "fill_disk": 0,
    "slow_disk": 1,  # a save may exceed its timeout
    "spoil_disks": 0,
    "damage_disk": 0,
    "fail": 1,
    "fail_at": 2,
    "mumble": 1,
    "repeat": 0,
    "ask_to_stop": 0,
}
_MEAN_S = 30.0  # mean time of a fault; a run without faults takes about as long


@dataclass
class Faults:
    """The faults of a run: `spread` draws them, `counts` counts those that struck.

    `notice` is called with a node that is about to go. With `coincide`, `spread` also
    draws combined faults, which chance alone would rarely produce.
    """

    world: World
    network: Network
    machines: Machines
    notice: Callable[[str], None] = lambda node: None
    ask_to_stop: Callable[[], None] = lambda: None
    coincide: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    last_loss_s: float = -1e9  # when a disk last lost something
    _when: dict[str, Callable[[], None]] = field(default_factory=dict)

    @property
    def has_damaged(self) -> bool:
        return bool(self.counts["damage_disk"] or self.counts["damage_and_crash"])

    def spread(self, number: int) -> None:
        """Draw this many faults, most of them early, all before FAULTS_S."""
        self.world.after(FAULTS_S, self.end)
        kinds = [*_KINDS, *_TOGETHER] if self.coincide else _KINDS
        for _ in range(number):
            kind = self.world.random.choice(kinds)
            at_s = min(LAST_S, self.world.random.expovariate(1 / _MEAN_S))
            self.world.after(at_s, lambda kind=kind: self._strike(kind))

    def end(self) -> None:
        """End all faults."""
        self.machines.up = {node.name for node in self.machines.cluster.nodes}
        self.machines.starts_fail = 0
        self.machines.broken.clear()
        self.network.garble_no_more()
        for worker in self.machines.alive():
            worker.mishaps.end()
        for disk in self.machines.disks:
            disk.is_full, disk.slowness, disk.fails_one_in = False, 1.0, 0.0

    def _strike(self, kind: Callable[["Faults"], None]) -> None:
        name = kind.__name__.strip("_")
        self.world.tell(f"fault: {name}")
        self.counts[name] += 1
        kind(self)

    def _some_worker(self) -> SimWorker | None:
        alive = self.machines.alive()
        return self.world.random.choice(alive) if alive else None

    def _some_host(self) -> str:
        names = [node.name for node in self.machines.cluster.nodes]
        return self.world.random.choice(names)

    def _kill(self) -> None:
        if worker := self._some_worker():
            worker.kill()

    def _kill_two(self) -> None:
        self._kill()
        self._kill()

    def _kill_soon_after(self) -> None:
        """Kill one more worker while the others handle the loss of the first."""
        self._kill()
        self.world.after(self.world.random.uniform(0.0, 15.0), self._kill)

    def _stop(self) -> None:
        """Stop a process for a while, or for ever."""
        if worker := self._some_worker():
            worker.stop()
            self.network.process_stopped(worker)
            self.world.after(self.world.random.uniform(1.0, 60.0), worker.go_on)

    def _get_stuck(self) -> None:
        """Let a worker give signs of life but never finish."""
        if worker := self._some_worker():
            worker.mishaps.is_stuck = True

    def _cut(self) -> None:
        chance, one = self.world.random, self._some_host()
        others = [CONTROLLER, *(node.name for node in self.machines.cluster.nodes)]
        other = chance.choice([name for name in others if name != one])
        self.network.cut(one, other, chance.uniform(1.0, 40.0))

    def _cut_off(self) -> None:
        """Cut a host off from all others."""
        one, for_s = self._some_host(), self.world.random.uniform(1.0, 40.0)
        for name in (CONTROLLER, *(node.name for node in self.machines.cluster.nodes)):
            if name != one:
                self.network.cut(one, name, for_s)

    def _reset(self) -> None:
        chance, one = self.world.random, self._some_host()
        others = [CONTROLLER, *(node.name for node in self.machines.cluster.nodes)]
        self.network.reset(one, chance.choice([n for n in others if n != one]))

    def _garble(self) -> None:
        self.network.garble(self.world.random.randint(1, 3))

    def _take_machine(self) -> None:
        """Take a machine away; it may come back, with or without its disk."""
        chance, host = self.world.random, self._some_host()
        if len(self.machines.up) <= 1:
            return
        self._take_away(host, keeps_disk=chance.random() < 0.5)
        delay_s = chance.uniform(1.0, 100.0)
        self.world.after(delay_s, lambda: self.machines.up.add(host))

    def _lose_power(self) -> None:
        """Cut the power of a machine, which restarts at once."""
        host = self._some_host()
        self._take_away(host, keeps_disk=True)
        self.machines.up.add(host)

    def _take_away(self, host: str, keeps_disk: bool) -> None:
        self.last_loss_s = self.world.now_s
        self.machines.take_away(host, keeps_disk)

    def _damage_disk(self) -> None:
        """Make one leaf of a checkpoint unreadable."""
        disk = self.machines.disk(self._some_host())
        if disk.damage():
            self.last_loss_s = self.world.now_s

    def _damage_and_crash(self) -> None:
        """Damage a disk, and crash the controller so that the disk is read soon."""
        self._damage_disk()
        self._crash_controller()

    def _fail(self) -> None:
        """Let a worker fail at its next request."""
        if worker := self._some_worker():
            worker.mishaps.fails_at = object

    def _fail_at(self) -> None:
        """Let a worker fail at one kind of request, perhaps one that a loss causes."""
        if worker := self._some_worker():
            worker.mishaps.fails_at = self.world.random.choice(_FAILS_AT)
        if self.world.one_in(2):
            self._kill()

    def _mumble(self) -> None:
        """Let a worker's next answer be invalid."""
        if worker := self._some_worker():
            worker.mishaps.mumbles = self.world.random.choice(["kind", "epoch"])

    def _repeat(self) -> None:
        """Let a worker repeat its last answer at the next request."""
        if worker := self._some_worker():
            worker.mishaps.mumbles = "again"

    def _diverge(self) -> None:
        """Let one worker report weights that are not finite."""
        if worker := self._some_worker():
            worker.mishaps.is_not_finite = True

    def _break_machine(self) -> None:
        """Break a machine, so that no process lives there for long."""
        self._break({self._some_host()})

    def _break_all(self) -> None:
        self._break({node.name for node in self.machines.cluster.nodes})

    def _break(self, hosts: set[str]) -> None:
        machines, chance = self.machines, self.world.random
        machines.broken |= hosts
        for worker in machines.alive():
            if worker.host in hosts:
                worker.kill()
        mended = lambda: machines.broken.difference_update(hosts)  # noqa: E731
        self.world.after(chance.uniform(20.0, 100.0), mended)

    def _fill_disk(self) -> None:
        disk = self.machines.disk(self._some_host())
        disk.is_full = True
        self.world.after(
            self.world.random.uniform(1.0, 60.0),
            lambda: setattr(disk, "is_full", False),
        )

    def _spoil_disks(self) -> None:
        """Let disks refuse some writes."""
        disks = self.machines.disks
        for disk in disks:
            disk.fails_one_in = self.world.random.choice([4.0, 8.0])

        def mend() -> None:
            for disk in disks:
                disk.fails_one_in = 0.0

        self.world.after(self.world.random.uniform(10.0, 60.0), mend)

    def _slow_disk(self) -> None:
        disk = self.machines.disk(self._some_host())
        disk.slowness = self.world.random.choice([10.0, 100.0])
        self.world.after(
            self.world.random.uniform(1.0, 60.0), lambda: setattr(disk, "slowness", 1.0)
        )

    def _fail_to_start(self) -> None:
        self.machines.starts_fail += self.world.random.randint(1, 2)
        self._kill()

    def _crash_controller(self) -> None:
        self.world.crash_at = self.world.num_events + self.world.random.randint(1, 60)

    def _give_notice(self) -> None:
        """Give notice that a machine will go; perhaps it does go soon after."""
        host = self._some_host()
        self.notice(host)
        if len(self.machines.up) > 1 and self.world.one_in(2):
            delay_s = self.world.random.uniform(5.0, 40.0)
            self.world.after(delay_s, lambda: self._go(host))

    def _go(self, host: str) -> None:
        if len(self.machines.up) > 1:
            self._take_away(host, keeps_disk=False)
            back_s = self.world.random.uniform(10.0, 100.0)
            self.world.after(back_s, lambda: self.machines.up.add(host))

    def _ask_to_stop(self) -> None:
        self.ask_to_stop()

    # --- several together

    def _flap(self) -> None:
        """Let a machine with a lasting disk go, return, and go again briefly."""
        chance, host, at_s = self.world.random, self._some_host(), 0.0
        for least_s, most_s in ((5.0, 20.0), (1.0, 10.0)):
            self.world.after(at_s, lambda: self._go_with_its_disk(host))
            at_s += chance.uniform(least_s, most_s)
            self.world.after(at_s, lambda: self.machines.up.add(host))
            at_s += chance.uniform(5.0, 25.0)

    @property
    def are_over(self) -> bool:
        return self.world.now_s > LAST_S

    def go_in_time(self, host: str) -> None:
        """Take the machine and its disk away, unless faults are over."""
        if not self.are_over:
            self._go(host)

    def _go_with_its_disk(self, host: str) -> None:
        if len(self.machines.up) > 1 and not self.are_over:
            self._take_away(host, keeps_disk=True)

    def _leave_and_fail(self) -> None:
        """Let a worker fail in the recovery that another worker's leaving causes."""
        self.notice(self._some_host())
        if worker := self._some_worker():
            worker.mishaps.fails_at = self.world.random.choice(_FAILS_AS_ALL_MOVE)

    def _take_at_the_end(self) -> None:
        """Take a machine and its disk away once the last step is reported as saved."""
        host, delay_s = self._some_host(), self.world.random.uniform(0.0, 0.5)
        go = lambda: self.go_in_time(host)  # noqa: E731
        self._when["last saved"] = lambda: self.world.after(delay_s, go)

    def _diverge_and_crash(self) -> None:
        """Report bad numbers and lose a worker; crash the controller after rollback."""
        self._diverge()
        self._kill()
        self._when["gone back"] = self._crash_controller

    def hear(self, moment: Literal["last saved", "gone back"]) -> None:
        """Run the action that waits for this moment."""
        self._when.pop(moment, lambda: None)()


_KINDS = [
    *[Faults._kill] * 5,
    *[Faults._kill_two] * 2,
    *[Faults._kill_soon_after] * 4,
    *[Faults._stop] * 2,
    Faults._get_stuck,
    *[Faults._cut] * 3,
    *[Faults._cut_off] * 2,
    *[Faults._reset] * 2,
    Faults._garble,
    *[Faults._take_machine] * 3,
    Faults._lose_power,
    Faults._damage_disk,
    *[Faults._damage_and_crash] * 2,
    *[Faults._fail] * 2,
    *[Faults._fail_at] * 2,
    Faults._mumble,
    Faults._repeat,
    *[Faults._diverge] * 2,
    *[Faults._break_machine] * 2,
    Faults._break_all,
    *[Faults._spoil_disks] * 2,
    Faults._fill_disk,
    Faults._slow_disk,
    Faults._fail_to_start,
    *[Faults._crash_controller] * 3,
    *[Faults._give_notice] * 2,
    Faults._ask_to_stop,
]
_TOGETHER = [
    *[Faults._flap] * 15,
    *[Faults._leave_and_fail] * 15,
    *[Faults._take_at_the_end] * 10,
    *[Faults._diverge_and_crash] * 10,
]
_FAILS_AS_ALL_MOVE = [schema.PlaceState, schema.CollectLeaves, schema.HoldState]
_FAILS_AT = [
    schema.PlaceState,
    schema.CollectLeaves,
    schema.FinishStep,
    schema.HoldState,
    schema.Reroute,
    schema.Join,
    schema.SaveState,
]
