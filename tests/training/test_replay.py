# SPDX-License-Identifier: Apache-2.0
"""A real run under kills, replayed through the deciding code: the same actions.

The recording has the inputs and the requests of the controller of real worker
processes. The replay runs the pure functions (`rounds.react`) and, above them, the
driver over ports that return the recorded answers.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hetjax.launchers.local_processes import OnThisMachine
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.rpc import rounds
from hetjax.runtime.rpc.rounds import Rounds
from hetjax.runtime.rpc.schema import AwaitSaved, Leave, TellSaving
from hetjax.runtime.rpc.worker_connections import SocketConnections, WorkerLost
from hetjax.train import main
from hetjax.training.recovery.driver import Driver
from hetjax.training.recovery.membership import Membership
from hetjax.training.recovery.recovered import RolledBack
from tests.training.pair import between_steps, kill, training
from tests.training.test_workers import losses

pytestmark = pytest.mark.usefixtures("environment")


@dataclass
class Tape:
    """The recorded calls of ports with their results, and the calls of the driver."""

    told: list[tuple[str, Any, Any]] = field(default_factory=list)
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    events: list[tuple[rounds.Event, float, Sequence[rounds.Action]]] = field(
        default_factory=list
    )
    made: dict[str, Any] = field(default_factory=dict)  # the driver's arguments

    def record(self, patched: pytest.MonkeyPatch) -> None:
        self._record_ports(patched)
        self._record_driver(patched)

    def _record_ports(self, patched: pytest.MonkeyPatch) -> None:
        ask, take = SocketConnections.ask, SocketConnections._handle
        workers = SocketConnections.workers.fget
        assert workers is not None

        def asked(connections: SocketConnections, requests: Any, progress: Any = None):
            key = connections.epoch, dict(requests)
            try:
                found = ask(connections, requests, progress)
            except WorkerLost as lost:
                self.told.append(("ask", key, lost))
                raise
            self.told.append(("ask", key, found))
            return found

        def there(connections: SocketConnections) -> list[str]:
            found = workers(connections)
            self.told.append(("workers", None, found))
            return found

        def started(launcher: OnThisMachine, names: Sequence[str]) -> None:
            at = len(self.told)
            try:
                start(launcher, names)
            finally:
                del self.told[at:]  # it checks which workers are there while it waits
            self.told.append(("start", list(names), None))

        def taken(connections: SocketConnections, event: Any) -> None:
            if not self.events:
                connections._record = lambda *entry: self.events.append(entry)
            take(connections, event)

        start = OnThisMachine.start
        patched.setattr(OnThisMachine, "start", started)
        patched.setattr(SocketConnections, "ask", asked)
        patched.setattr(SocketConnections, "workers", property(there))
        patched.setattr(SocketConnections, "_handle", taken)

    def _record_driver(self, patched: pytest.MonkeyPatch) -> None:
        def made(controller: Controller, launcher: Any, config: Any, **others: Any):
            self.made = {
                "plan": controller.plan,
                "nodes": controller.members.nodes,
                "names": copy(controller.new_attempts),
                "config": replace(
                    config,
                    loss_scaling=copy(config.loss_scaling),
                    checking=deepcopy(config.checking),
                    membership=Membership(others["cluster"], None),
                ),
                "others": others,
            }
            return Driver(controller, launcher, config, **others)

        patched.setattr("hetjax.training.driver_setup.Driver", made)
        depth: list[str] = []
        for name in ("begin", "step", "check", "validate", "save", "wait_saved"):
            method = getattr(Driver, name)

            def call(driver: Driver, *given: Any, _m=method, _n=name, **named: Any):
                if not depth:
                    given = self._noted(_n, given)
                depth.append(_n)
                try:
                    return _m(driver, *given, **named)
                finally:
                    depth.pop()

            patched.setattr(Driver, name, call)

    def _noted(self, name: str, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Record a call, and the results of a function among its arguments."""
        if name != "save":
            self.calls.append((name, given))
            return given
        step, best = given
        said: list[Any] = []

        def saying() -> Any:
            said.append(best())
            return said[-1]

        self.calls.append((name, (step, lambda: said[0])))
        return step, saying


@dataclass
class Replayed:
    """Connections and launcher that return recorded results, and refuse other calls."""

    told: list[tuple[str, Any, Any]]
    epoch: int = 0
    only: None = None
    pids: Mapping[str, int] = field(default_factory=dict)
    noticed: Callable[..., None] = lambda worker, notice: None

    @property
    def connections(self) -> "Replayed":
        return self

    @property
    def workers(self) -> list[str]:
        return self._next("workers", None)

    def ask(self, requests: Mapping[str, Any], progress: Any = None) -> Any:
        found = self._next("ask", (self.epoch, dict(requests)))
        if isinstance(found, WorkerLost):
            raise WorkerLost(found.worker, found.reason, found.reports)
        return found

    def lose(self, worker: str, reason: str) -> None:
        """Ignore the loss, which is already recorded."""

    def start(self, workers: Sequence[str]) -> None:
        self._next("start", list(workers))

    def interrupted_by(self, interrupt: Callable[[], None]):
        return nullcontext()

    def _next(self, kind: str, asked: Any) -> Any:
        then, key, found = self.told.pop(0)
        assert (kind, asked) == (then, key), "it does something else than it did"
        return found


@pytest.mark.nightly
def test_a_run_under_kills_does_the_same_again_when_it_is_told_the_same(
    tmp_path: Path, cache: Path, whole: list[float], monkeypatch: pytest.MonkeyPatch
):
    run_dir, tape = tmp_path / "run", Tape()
    with monkeypatch.context() as patched:
        between_steps(
            patched, *(lambda w=w: kill(run_dir, w) for w in ("right", "left"))
        )
        tape.record(patched)
        assert main(training(run_dir, cache)) == 0
    assert losses(run_dir) == whole
    _replay_rounds(tape)
    _replay_driver(tape)


def _replay_rounds(tape: Tape) -> None:
    assert sum(isinstance(event, rounds.Ended) for event, _, _ in tape.events) >= 2
    (event, now_s, _), *others = tape.events
    state, _ = rounds.react(event, Rounds(), now_s)
    for event, now_s, done in others:
        state, again = rounds.react(event, state, now_s)
        assert again == tuple(done)


def _replay_driver(tape: Tape) -> None:
    made, ports = tape.made, Replayed(list(tape.told))
    assert sum(isinstance(found, WorkerLost) for _, _, found in tape.told) >= 2
    controller = Controller(made["plan"], ports, made["nodes"])  # type: ignore[arg-type]
    controller.new_attempts = made["names"]
    driver = Driver(
        controller,
        ports,  # type: ignore[arg-type]
        made["config"],
        **made["others"],
    )
    for name, given in tape.calls:
        try:
            getattr(driver, name)(*given)
        except RolledBack:
            continue
    left = {type(r) for _, key, _ in ports.told if key for r in key[1].values()}
    assert left <= {AwaitSaved, TellSaving, Leave}, "it did not do all that it did"
