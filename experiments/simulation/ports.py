# SPDX-License-Identifier: Apache-2.0
"""Simulates the controller's ports: connections, machines and a journal.

The ports behave as in a real run, except that waiting lets simulated time pass. The
real function (`hetjax/runtime/rpc/rounds.py`) reacts to events, and all code above
these ports is real: `Controller`, `Driver`, `Loop`. Owns the ports.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from experiments.simulation.disk import Disk
from experiments.simulation.network import End
from experiments.simulation.site import Site
from experiments.simulation.worker import SimWorker
from experiments.simulation.world import Process, Violation
from hetjax.cluster.cluster import Cluster, part_of
from hetjax.runtime.rpc import rounds, schema
from hetjax.runtime.rpc.message import LIMITS, START
from hetjax.runtime.rpc.rounds import Rounds
from hetjax.runtime.rpc.schema import Request
from hetjax.runtime.rpc.worker_connections import (
    Answer,
    Progress,
    WorkerLost,
    answers_of,
)

CONTROLLER = "controller"
_START_S = 0.5, 4.0
_LOOK_S = 0.5


class SimConnections:
    """`WorkerConnections` over simulated connections."""

    def __init__(self, site: Site, process: Process, asked_s: deque[float]) -> None:
        self._site, self._process, self._asked_s = site, process, asked_s
        self._state = Rounds()
        self._lines: dict[tuple[str, int], End] = {}
        self._is_busy, self._waiting = False, list[rounds.Event]()
        self._finished: rounds.Finish | None = None
        self._interrupt: Callable[[], None] = lambda: None
        self.only, self.epoch = None, 0
        self.noticed: Callable[[str, schema.Noticed], None] = lambda worker, told: None

    @property
    def workers(self) -> list[str]:
        return [*self._state.there]

    def admit(self, worker: SimWorker, line: End) -> None:
        """Add the connection of a worker that has called."""
        name, incarnation = worker.worker, worker.incarnation

        def received(message: tuple[int, schema.Message]) -> None:
            number, told = message
            if isinstance(told, schema.Noticed):
                return self.noticed(name, told)
            self._handle(rounds.Heard(name, incarnation, number, told))

        line.received = received
        line.ended = lambda why: self._handle(rounds.Ended(name, incarnation, why))
        self._lines[name, incarnation] = line
        self._handle(rounds.Called(name, incarnation, incarnation))

    def expect(self, worker: str, incarnation: int) -> None:
        self._handle(rounds.Spawned(worker, incarnation))

    def wait_for(self, workers: Sequence[str], alive: Callable[[], None]) -> None:
        begun_s = self._site.world.now_s
        while not self.have_called(workers, begun_s, alive):
            self._interrupt()
            first = next(w for w in workers if w not in self._state.there)
            self._sleep(0.1, lambda first=first: first in self._state.there)

    def have_called(
        self, workers: Sequence[str], begun_s: float, alive: Callable[[], None]
    ) -> bool:
        limit_s = self._state.limit_s(START)
        missing = [w for w in workers if w not in self._state.there]
        if not missing:
            return True
        alive()
        if self._site.world.now_s > begun_s + limit_s:
            reason = LIMITS[START].passed(limit_s)
            raise WorkerLost(missing[0], reason)
        return False

    @contextmanager
    def interrupted_by(self, interrupt: Callable[[], None]) -> Iterator[None]:
        before, self._interrupt = self._interrupt, interrupt
        try:
            yield
        finally:
            self._interrupt = before

    def ask(
        self,
        requests: Mapping[str, Request[Answer]],
        progress: Progress | None = None,
    ) -> dict[str, Answer]:
        if not requests:
            return {}
        (what,) = {type(request) for request in requests.values()}
        names = ", ".join(requests)
        self._site.world.tell(f"asks {names}: {what.__name__}")
        if any(isinstance(request, schema.Leave) for request in requests.values()):
            self._site.leaving(requests.keys())
        self._be_busy()
        self._check_lines()
        self._asked_s.append(self._site.world.now_s)
        self._finished = None
        asked = {w: replace(r, epoch=self.epoch) for w, r in requests.items()}
        self._handle(rounds.Asked(asked))
        while self._finished is None:
            self._interrupt()
            found = self._state.round
            assert found is not None
            left_s = found.end_s - self._site.world.now_s + 0.001
            self._sleep(max(0.001, left_s), lambda: self._finished is not None)
            self._handle(rounds.TimePassed())
        if self._finished.trouble is not None:
            self._site.world.tell(f"  trouble: {self._finished.trouble}")
            self._site.lost()
        return answers_of(self._finished, what)

    def _check_lines(self) -> None:
        """Raise Violation if a start that is not the newest is still connected."""
        for (worker, incarnation), line in self._lines.items():
            if line.is_open and self._state.there.get(worker) != incarnation:
                raise Violation(f"a start of {worker} is lost, and still connected")

    def lose(self, worker: str, reason: str) -> None:
        self._handle(rounds.TakenForLost(worker, reason))

    def close(self) -> None:
        for line in [*self._lines.values()]:
            line.close()

    def _be_busy(self) -> None:
        """Sometimes keep the controller busy with something else, while events wait."""
        world = self._site.world
        if not world.one_in(30):
            return
        self._is_busy = True
        try:
            end_s = world.now_s + world.random.uniform(0.1, 20.0)
            world.run_until(lambda: False, end_s)
        finally:
            self._is_busy = False
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            self._handle(event)

    def _sleep(self, limit_s: float, is_over: Callable[[], bool]) -> None:
        """Let time pass, and call the interrupt regularly."""
        world = self._site.world
        end_s = world.now_s + limit_s
        while not is_over() and world.now_s < end_s:
            self._interrupt()
            world.run_until(is_over, min(end_s, world.now_s + 60.0))

    def _handle(self, event: rounds.Event) -> None:
        if self._is_busy:
            return self._waiting.append(event)
        self._state, actions = rounds.react(event, self._state, self._site.world.now_s)
        for action in actions:
            if isinstance(action, rounds.Send):
                line = self._lines.get((action.worker, action.connection))
                if line is not None:
                    line.send((action.number, action.request))
            elif isinstance(action, rounds.Close):
                line = self._lines.pop((action.worker, action.connection), None)
                if line is not None:
                    line.close()
            elif isinstance(action, rounds.Finish):
                self._finished = action


_NUM_ROUNDS = 8  # for so many rounds a loss may stay unknown to the controller


class Machines:
    """The hosts that are up, what runs on them, and their disks."""

    def __init__(
        self,
        site: Site,
        cluster: Cluster,
        is_shared: bool,
        tried: Callable[[], None],
    ) -> None:
        self.site, self.cluster, self._is_shared = site, cluster, is_shared
        self.tried = tried  # called at each attempt to start workers
        self.num_tries = 0  # to start workers, since the last step
        self.broken = set[str]()  # hosts on which no process survives
        self.up = {node.name for node in cluster.nodes}
        self.running: dict[str, list[SimWorker]] = {}
        self._shared, self._own = Disk(site.world), dict[str, Disk]()
        self._num_started = 0
        self.asked_s: deque[float] = deque(maxlen=_NUM_ROUNDS)  # of the last rounds
        self.num_called = 0  # how many started workers have called
        self.starts_fail = 0  # how many future starts fail

    def disk(self, host: str) -> Disk:
        if self._is_shared:
            return self._shared
        return self._own.setdefault(host, Disk(self.site.world))

    @property
    def disks(self) -> list[Disk]:
        return self.disks_of(None)

    def disks_of(self, hosts: Collection[str] | None) -> list[Disk]:
        """Return the disks of these machines, or all disks if None."""
        if self._is_shared:
            return [self._shared]
        own = self._own.items()
        return [disk for host, disk in own if hosts is None or host in hosts]

    def alive(self) -> list[SimWorker]:
        return [w for some in self.running.values() for w in some if w.is_alive]

    def start(self, worker: str) -> SimWorker:
        self._num_started += 1
        found = SimWorker(self.site, worker, self._num_started, self.disk(worker))
        self.running.setdefault(worker, []).append(found)
        return found

    def take_away(self, host: str, keeps_disk: bool) -> None:
        """Remove the machine at once, with all that runs there."""
        self.up.discard(host)
        for process in self.running.get(host, []):
            process.kill()
        if self._is_shared:
            return
        if keeps_disk:
            self.disk(host).lose_power()
        else:
            self._own[host] = Disk(self.site.world)


class SimLauncher:
    """`Launcher` of simulated processes, which outlive a controller that dies."""

    def __init__(self, machines: Machines, process: Process) -> None:
        self.machines, self._process = machines, process
        self.connections = SimConnections(machines.site, process, machines.asked_s)
        self._own: dict[str, SimWorker] = {}
        self._begun_s: dict[str, float] = {}
        self._machineless = set[str]()

    def start(self, workers: Sequence[str]) -> None:
        self.machines.num_tries += bool(workers)
        self.machines.tried()
        self.begin(workers)
        try:
            self.connections.wait_for(workers, lambda: self._check(workers))
        except WorkerLost:
            self.machines.site.lost()
            raise

    def begin(self, workers: Sequence[str]) -> None:
        site = self.machines.site
        self._machineless.difference_update(workers)
        for worker in workers:
            self._end_earlier(worker)
            self._begun_s[worker] = site.world.now_s
            if worker not in self.machines.up:
                self._machineless.add(worker)
                continue
            self._own[worker] = started = self.machines.start(worker)
            site.world.tell(f"{started.name} starts")
            self.connections.expect(worker, started.incarnation)
            delay_s = site.world.random.uniform(*_START_S)
            if self.machines.starts_fail or worker in self.machines.broken:
                self.machines.starts_fail = max(0, self.machines.starts_fail - 1)
                started.after(delay_s, started.kill)
            else:
                started.after(delay_s, lambda w=started: self._call(w))

    def are_there(self, workers: Sequence[str]) -> bool:
        begun_s = min((self._begun_s[worker] for worker in workers), default=0.0)
        check = lambda: self._check(workers)  # noqa: E731
        return self.connections.have_called(workers, begun_s, check)

    def _check(self, workers: Sequence[str]) -> None:
        for worker in workers:
            if worker in self._machineless:
                raise WorkerLost(worker, "has no machine")
            if not self._own[worker].is_alive:
                raise WorkerLost(worker, "ended with code -9")

    @property
    def pids(self) -> Mapping[str, int]:
        return {}

    def present(self, cluster: Cluster, again: bool) -> Cluster | None:
        there = {node.name for node in cluster.nodes} & self.machines.up
        return part_of(cluster, there) if there else None

    def _end_earlier(self, worker: str) -> None:
        """End the earlier process of this worker, unless its host is unreachable."""
        earlier, site = self._own.pop(worker, None), self.machines.site
        if earlier is None:
            return
        if site.network.cut_until_s(CONTROLLER, worker) <= site.world.now_s:
            earlier.kill()

    def _call(self, worker: SimWorker) -> None:
        site = self.machines.site
        healed_s = site.network.cut_until_s(CONTROLLER, worker.host)
        if healed_s > site.world.now_s:
            delay_s = healed_s - site.world.now_s
            return worker.after(delay_s, lambda: self._call(worker))
        if not self._process.is_alive:
            return worker.kill()
        line, other = site.network.connect(worker, self._process)
        worker.line = line
        line.received, line.ended = worker.hear, worker.controller_gone
        self.machines.num_called += 1
        self.connections.admit(worker, other)


class SimJournal:
    """`Journal` of metrics that outlives the controller; `heard` receives each line."""

    def __init__(self, heard: Callable[[dict[str, Any]], None]) -> None:
        self.lines: list[dict[str, Any]] = []
        self._heard, self._undone = heard, set[int]()
        self.may_write: Callable[[], None] = lambda: None

    def append(self, line: dict[str, Any]) -> None:
        self.may_write()
        self.lines.append(line)
        self._heard(line)

    def rewind(self, last_step: int) -> list[dict[str, Any]]:
        self.may_write()
        dropped = [line for line in self.lines if line["step"] > last_step]
        self._undone |= {line["step"] for line in dropped}
        self.lines = [line for line in self.lines if line["step"] <= last_step]
        return dropped

    def steps_found_again(self, last_step: int) -> set[int]:
        """Return steps up to `last_step` that lack a line because they were undone."""
        have = {line["step"] for line in self.lines if "loss" in line}
        return {step for step in self._undone - have if step <= last_step}
