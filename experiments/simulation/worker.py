# SPDX-License-Identifier: Apache-2.0
"""Simulates a worker: it decides as a real one does, but its work only takes time.

The real functions (`hetjax/runtime/worker/duties.py`) decide its next action, its
progress and its refusals. Owns the substitutes for the work: stages of one number per
layer, and a step that waits for peers. Does not own links (`peers.py`), leaves
(`inventory.py`), nor writing (`writer.py`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from experiments.simulation.disk import Disk
from experiments.simulation.durations import takes_s
from experiments.simulation.inventory import Inventory
from experiments.simulation.mishaps import Mishaps
from experiments.simulation.network import End
from experiments.simulation.peers import CONNECT_S, PeerGone, Peers
from experiments.simulation.shares import layers_of, led_by, workers_of
from experiments.simulation.site import Site
from experiments.simulation.truth import commit_of, share, updated
from experiments.simulation.world import Process, Violation
from experiments.simulation.writer import Writer
from hetjax.plans.plan import Plan
from hetjax.plans.rerouting import with_microbatches
from hetjax.plans.worker_map import file_name
from hetjax.runtime.rpc import schema
from hetjax.runtime.rpc.message import AnyRequest
from hetjax.runtime.rpc.schema import Message
from hetjax.runtime.worker import duties
from hetjax.runtime.worker.duties import (
    Duties,
    Progress,
    begun,
    committed,
    done,
    rerouted,
)


class SimWorker(Process):
    """A worker process; `line` is its connection to the controller."""

    def __init__(self, site: Site, worker: str, incarnation: int, disk: Disk) -> None:
        super().__init__(site.world, worker, f"{worker}#{incarnation}")
        self.worker, self.incarnation = worker, incarnation
        self.line: End
        self.has_left = False  # on request, in good order
        self.mishaps = Mishaps()
        self._site, self._disk = site, disk
        self._duties, self._progress = Duties(), Progress()
        self._plan: Plan | None = None
        self._built_for: Plan | None = None
        self._state: dict[str, int] | None = None
        self._inventory = Inventory(disk, site.bucket)
        self._peers: Peers | None = None
        self._writer = Writer(self, disk, site)
        self._unfinished: dict[str, int] | None = None
        self._looking: list[Callable[[], None]] = []  # wait for messages
        self.ended = self._has_ended

    def hear(self, message: tuple[int, AnyRequest]) -> None:
        """Handle a request from the controller."""
        self._handle(duties.Requested(*message))

    def controller_gone(self, reason: str) -> None:
        self._handle(duties.ControllerGone(reason))

    def leave_by_itself(self) -> None:
        """End in good order."""
        self.line.close()
        self.kill()

    def _has_ended(self) -> None:
        self.world.tell(f"{self.name} has ended")
        self._site.network.process_ended(self)

    def _handle(self, event: duties.Event) -> None:
        self._duties, actions = duties.react(event, self._duties)
        for action in actions:
            if isinstance(action, duties.Begin):
                self._begin(action.request)
            elif isinstance(action, duties.Reply):
                self._reply(action.number, action.message)
            elif isinstance(action, duties.AbortDuty):
                if self._peers is not None:
                    self._peers.lose(action.request.worker, action.request.reason)
            else:
                self.has_left = self.is_alive and not action.reason
                self.leave_by_itself()

    def _reply(self, number: int, message: Message) -> None:
        for reply in self.mishaps.replies(number, message, self._duties.has_ended):
            self.line.send(reply)

    def _begin(self, request: AnyRequest) -> None:
        try:
            self._progress = begun(self._progress, request)
        except duties.OutOfOrder as wrong:
            return self._answer(schema.RequestFailed(error=f"OutOfOrder: {wrong}"))
        if isinstance(request, schema.Train):
            self._unfinished = self._state
        if isinstance(request, (schema.Build, schema.Leave)):
            self._state = None
        self.after(takes_s(self.world, request), lambda: self._go_on(request))

    def _go_on(self, request: AnyRequest) -> None:
        if self.mishaps.is_stuck:
            return
        if self.mishaps.fails(request):
            return self._answer(schema.RequestFailed(error="OSError: no luck"))
        found = _HANDLERS[type(request)](self, request)
        if found is not None:
            self._finish(request, found)

    def _finish(self, request: AnyRequest, answer: Message) -> None:
        self._progress = done(self._progress, request)
        self._tell_state()
        self._answer(answer)

    def _answer(self, answer: Message) -> None:
        self._handle(duties.Answered(answer))

    def _beside(self, request: AnyRequest, work: Callable[[], Message | None]) -> None:
        """Run blocking work in a fiber and answer with its result unless it is None."""

        def do() -> None:
            try:
                answer = work()
            except Violation:
                raise
            except Exception as error:
                failed = f"{type(error).__name__}: {error}"
                return self._answer(schema.RequestFailed(error=failed))
            if answer is not None:
                self._finish(request, answer)

        self.begin(do)

    def _tell_state(self) -> None:
        if self._state is not None and self._progress.at is not None:
            self._site.told(self, self._state, self._progress.at)

    def _wait(self, request: AnyRequest, look: Callable[[], Message | None]) -> None:
        """Answer once `look` finds an answer among the messages; PeerGone ends it."""

        def again() -> None:
            if self.mishaps.is_stuck:
                return
            try:
                found = look()
            except PeerGone as gone:
                self._looking.remove(again)
                return self._answer(schema.Lost(worker=gone.peer, reason=gone.reason))
            if found is not None:
                self._looking.remove(again)
                self._finish(request, found)

        self._looking.append(again)
        again()

    def _look(self) -> None:
        for look in [*self._looking]:
            look()

    # --- handlers of requests

    def _build(self, request: schema.Build) -> Message:
        self._plan = self._built_for = request.settings["plan"]
        return schema.Done()

    def _reroute(self, request: schema.Reroute) -> Message:
        """Take other numbers of microbatches; its single stage is never behind."""
        assert self._built_for is not None
        self._plan = with_microbatches(self._built_for, request.num_microbatches)
        self._progress, self._unfinished = rerouted(self._progress, False), None
        return schema.Done()

    def _ahead(self, request: schema.TellCompilingAhead) -> Message:
        return schema.CompilingAhead(is_done=self.world.one_in(2))

    def _listen(self, request: schema.Listen) -> Message:
        self._peers = Peers(self, self._site.network, self._look)
        address = f"{self.name}:{self.world.num_events}"
        self._site.listening[address] = self._peers
        return schema.Address(address=address)

    def _join(self, request: schema.Join) -> None:
        peers = self._peers
        assert peers is not None
        if self._plan is None:
            return self._answer(schema.RequestFailed(error="build first"))
        for peer, address in request.addresses.items():
            if self.worker < peer:
                peers.call(self._site.listening[address], address)
        end_s = self.world.now_s + CONNECT_S
        self.after(CONNECT_S + 1.0, self._look)
        are_there = lambda: peers.are_there(request.addresses, end_s)  # noqa: E731
        self._wait(request, lambda: schema.Done() if are_there() else None)

    def _compile(self, request: schema.Compile) -> Message:
        return schema.Done()

    def _initialise(self, request: schema.Initialise) -> Message:
        self._forget()
        first = self._site.first()
        self._state = {layer: first[layer] for layer in self._layers()}
        return schema.Done()

    def _train(self, request: schema.Train) -> None:
        peers, plan, state = self._peers, self._plan, self._state
        assert peers is not None and plan is not None and state is not None
        if peers.lost is not None and self.world.one_in(2):
            # it needed data of the lost peer before it could do its own part
            return self._answer(schema.Lost(worker=peers.lost[0], reason=peers.lost[1]))
        key = "squares", request.turn
        mine = {layer: share(state[layer], request.step) for layer in self._leads()}
        everybody = workers_of(plan)
        for worker in everybody:
            if worker != self.worker and worker in peers.ends:
                peers.ends[worker].send((key, sum(mine.values())))
        peers.messages[self.worker, key] = sum(mine.values())

        def look() -> Message | None:
            if any((worker, key) not in peers.messages for worker in everybody):
                peers.check()
                return None
            total = sum(peers.messages[worker, key] for worker in everybody)
            commit = commit_of(total)
            self._state = updated(state, commit)
            self._progress = committed(request.step, commit)
            return schema.Trained(commit=commit)

        self._wait(request, look)

    def _finish_step(self, request: schema.FinishStep) -> Message:
        assert self._unfinished is not None, "no step was aborted"
        self._state, self._unfinished = updated(self._unfinished, request.commit), None
        return schema.Done()

    def _reached(self, request: schema.TellReached) -> Message:
        return schema.Reached(
            at=self._progress.at,
            commit=self._progress.commit,
            is_aborted=self._unfinished is not None,
        )

    def _hold(self, request: schema.HoldState) -> Message:
        if self._progress.at is not None and self._state is not None:
            self._inventory.keep(self._progress.at, self._state)
        return self._inventory.in_memory()

    def _find_saves(self, request: schema.FindSaves) -> Message:
        self._writer.keep_all()
        return self._inventory.on_disk()

    def _needs(self, request: schema.TellNeeds) -> Message:
        leaves = dict.fromkeys(self._layers(), 8)
        return schema.NeededState(at=self._progress.at, leaves=leaves)

    def _collect(self, request: schema.CollectLeaves) -> None:
        if not request.own.get("cloud"):
            return self._exchange(request)

        def fetch() -> None:
            self._inventory.fetch(request)
            self._exchange(request)

        self._beside(request, fetch)

    def _exchange(self, request: schema.CollectLeaves) -> None:
        peers = self._peers
        assert peers is not None
        for worker, tier, leaves in request.give:
            for leaf in leaves:
                if worker in peers.ends:  # else it has gone meanwhile
                    value = self._inventory.read(tier, request.save, leaf)
                    peers.ends[worker].send((("leaf", request.turn, leaf), value))
        own = self._inventory.own(request)
        wanted = {
            (worker, ("leaf", request.turn, leaf)): leaf
            for worker, leaves in request.take
            for leaf in leaves
        }

        def look() -> Message | None:
            if not wanted.keys() <= peers.messages.keys():
                peers.check()
                return None
            values = own | {leaf: peers.messages[at] for at, leaf in wanted.items()}
            self._inventory.taken |= {
                leaf: v for leaf, v in values.items() if v is not None
            }
            peers.check()
            return schema.Collected(
                missing=[leaf for leaf, value in values.items() if value is None],
                num_bytes={},
                seconds={},
            )

        self._wait(request, look)

    def _place(self, request: schema.PlaceState) -> Message:
        if self._progress.at != request.step:
            taken = self._inventory.taken
            self._state = {layer: taken[layer] for layer in self._layers()}
        self._forget()
        return schema.Done()

    def _forget(self) -> None:
        self._inventory.forget()
        self._unfinished = None

    def _evaluate(self, request: schema.Evaluate) -> Message:
        assert self._peers is not None
        if self._peers.lost is not None:
            peer, reason = self._peers.lost
            return schema.Lost(worker=peer, reason=reason)
        return schema.Evaluated(losses=[((0, 0), 1.0)], num_tokens=8)

    def _check_state(self, request: schema.CheckState) -> Message:
        return schema.CheckedState(stages=self.mishaps.stages())

    def _drop(self, request: schema.DropState) -> Message | None:
        self._forget()
        if self._site.bucket is None:
            return self._dropped(request)
        self._beside(request, partial(self._dropped, request))
        return None

    def _dropped(self, request: schema.DropState) -> Message:
        self._state = None
        self._writer.open(request.storage)
        self._site.giving_up(request.kept)
        self._writer.discard_after(request.kept)
        self._site.dropped(self)
        return schema.Done()

    def _saving_state(self, request: schema.TellSaving) -> Message:
        writer, saves = self._writer, bool(self._leads())
        return schema.SavingState(
            saves=saves,
            busy=writer.busy,
            storing=writer.is_storing,
            newest=writer.newest,
        )

    def _save(self, request: schema.SaveState) -> Message:
        assert self._state is not None
        if file_name(self.worker) in request.workers:
            state = self._state
            self._writer.save(request, {layer: state[layer] for layer in self._leads()})
        return schema.Done()

    def _await_saved(self, request: schema.AwaitSaved | schema.Leave) -> None:
        self._writer.wait(lambda: self._finish(request, schema.Done()))

    def _leave(self, request: schema.Leave) -> None:
        """Leave once everything is in the store, however long that takes."""

        if self._site.bucket is None:
            return self._await_saved(request)

        def close() -> Message:
            self._writer.close()
            return schema.Done()

        self._writer.wait(lambda: self._beside(request, close))

    def _layers(self) -> list[str]:
        """The layers of this worker's stages, in all replicas."""
        return layers_of(self._plan, self._site.layers).get(self.worker, [])

    def _leads(self) -> list[str]:
        assert self._plan is not None
        return led_by(self.worker, self._plan, self._site.layers)


_HANDLERS: Mapping[type[AnyRequest], Callable[[SimWorker, Any], Message | None]] = {
    schema.Build: SimWorker._build,
    schema.CompileAhead: lambda worker, asked: schema.Done(),
    schema.TellCompilingAhead: SimWorker._ahead,
    schema.Listen: SimWorker._listen,
    schema.Join: SimWorker._join,
    schema.Compile: SimWorker._compile,
    schema.Initialise: SimWorker._initialise,
    schema.Train: SimWorker._train,
    schema.Reroute: SimWorker._reroute,
    schema.FinishStep: SimWorker._finish_step,
    schema.TellReached: SimWorker._reached,
    schema.HoldState: SimWorker._hold,
    schema.FindSaves: SimWorker._find_saves,
    schema.TellNeeds: SimWorker._needs,
    schema.CollectLeaves: SimWorker._collect,
    schema.PlaceState: SimWorker._place,
    schema.Evaluate: SimWorker._evaluate,
    schema.CheckState: SimWorker._check_state,
    schema.DropState: SimWorker._drop,
    schema.TellSaving: SimWorker._saving_state,
    schema.SaveState: SimWorker._save,
    schema.AwaitSaved: SimWorker._await_saved,
    schema.Leave: SimWorker._leave,
}
