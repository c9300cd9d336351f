# SPDX-License-Identifier: Apache-2.0
"""What a worker does about each request, in whichever process it is.

Owns the worker's parts (its stages, its data, its connections to peers, what it saves
and what it salvages) and one handler for each request. What goes wrong is raised. Does
not own how requests come (`serving.py`, `in_process.py`), nor anything that is of the
whole process. What a worker works on is made by a room above.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from hetjax.checkpoint.format import Entry, leaf_names
from hetjax.checkpoint.replication import PeerReplication
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.comm.connections import SILENCE_S
from hetjax.comm.peers import Peers
from hetjax.comm.pull import PullServer
from hetjax.plans.worker_map import WorkerMap, file_name
from hetjax.runtime import messages
from hetjax.runtime.feeding import Batch
from hetjax.runtime.host_group import HostGroup
from hetjax.runtime.messages import Json, Message, Request
from hetjax.runtime.outcome import StepCommit
from hetjax.runtime.saving import Saving
from hetjax.runtime.stage_runtime import StageRuntime
from hetjax.runtime.state_inventory import (
    StateInventory,
    collect_leaves,
    from_leaves,
    leaf_bytes,
)
from hetjax.runtime.timeline import Timeline
from hetjax.runtime.warming import Warmer
from hetjax.schedule.programs.action import format_program

_CONNECT_S = 120.0  # until all peers have called: they may be starved
_ALONE = "a worker without a bootstrap has no peers"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerBootstrap:
    """Where a worker stands: what it is told by whoever starts it.

    `listen` is the address at which its peers reach it (port 0: any). One that
    `watches` tells of notices that its machine is about to go.
    """

    worker: str
    controller: str
    listen: str
    secret: bytes
    silence_s: float = SILENCE_S
    watches: bool = False

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0]

    def text(self) -> str:
        """One line, for a pipe that nobody else reads."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields | {"secret": self.secret.hex()})


def read_bootstrap(text: str) -> WorkerBootstrap:
    """Inverse of `WorkerBootstrap.text`."""
    fields = json.loads(text)
    return WorkerBootstrap(**(fields | {"secret": bytes.fromhex(fields["secret"])}))


class Work(Protocol):
    """What a worker works on: its stages and its own copy of the data."""

    @property
    def runtime(self) -> StageRuntime: ...

    def close(self) -> None:
        """Let go of it: something else is built, or the worker ends."""
        ...

    def batch(self, step: int) -> Batch:
        """The global batch of a training step."""
        ...

    def validation(self, number: int) -> Batch:
        """One of the global batches of an evaluation."""
        ...


class WorkerService:
    """A worker: `answer` does what it is asked.

    `make` makes what it works on, `warm` compiles the same ahead. One that has no
    `bootstrap` is alone. `tell` hears how far compiling is.
    """

    def __init__(
        self,
        worker: str,
        make: Callable[[Json], Work],
        *,
        bootstrap: WorkerBootstrap | None = None,
        warm: Callable[[Json], None] = lambda settings: None,
        tell: Callable[[messages.Compiling], None] = lambda compiling: None,
    ) -> None:
        self._worker, self._bootstrap = worker, bootstrap
        self._make, self._warm_up, self._tell = make, warm, tell
        self._warmer = Warmer()
        self.peers: Peers | None = None
        self._work: Work | None = None
        self._timelines: list[tuple[Timeline, WorkerMap]] = []  # one for each plan
        self._at: int | None = None  # steps that the state has behind it
        self._commit: StepCommit | None = None  # of the last one, if done here
        self._inventory = StateInventory()
        self._saving = Saving(file_name(worker), self._open_copies)
        self._server: PullServer | None = None  # once made, for as long as the process
        silence_s = SILENCE_S if bootstrap is None else bootstrap.silence_s
        self.host_group = HostGroup(
            worker, "" if bootstrap is None else bootstrap.host, silence_s
        )

    def answer(self, request: Request[Any]) -> Message:
        """Do it; raises PeerLost, BadInput, or whatever went wrong."""
        return HANDLERS[type(request)](self, request) or messages.Done()

    def close(self) -> None:
        """Finish what is being written, and let go of everything."""
        if self._work is not None:
            self._work.close()
        self._saving.close()

    def _coordinate(self, request: messages.Coordinate) -> messages.Address:
        return messages.Address(address=self.host_group.coordinate())

    def _build(self, request: messages.Build) -> None:
        if request.world is not None:
            self.host_group.enter(request.world)
        if self._work is not None:
            self._work.close()
        self._warmer.clear()
        self._work = self._at = None  # what it held may have been kept: `HoldState`
        self._work = self._make(request.settings)
        self._timelines.append((Timeline(self._runtime.plan), self._runtime.members))

    def _compile_ahead(self, request: messages.CompileAhead) -> None:
        self._warmer.add(lambda: self._warm_up(request.settings))

    def _listen(self, request: messages.Listen) -> messages.Address:
        assert self._bootstrap is not None, _ALONE
        bootstrap = self._bootstrap
        self.peers = Peers(
            bootstrap.worker, bootstrap.listen, bootstrap.secret, bootstrap.silence_s
        )
        return messages.Address(address=self.peers.address)

    def _join(self, request: messages.Join) -> None:
        assert self._bootstrap is not None and self.peers is not None, _ALONE
        self.peers.connect(request.addresses, _CONNECT_S)
        if request.transport == "transfer" and self._server is None:
            self._server = PullServer(self._bootstrap.host, self._bootstrap.secret)
        server = self._server if request.transport == "transfer" else None
        self._runtime.join(self.peers, request.epoch, server)

    def _compile(self, request: messages.Compile) -> None:
        self._runtime.compile(
            lambda done, of: self._tell(messages.Compiling(num_done=done, num_all=of))
        )

    def _initialise(self, request: messages.Initialise) -> None:
        self._inventory.forget()
        self._runtime.initialise(request.seed)
        self._at = 0

    def _train(self, request: messages.Train) -> messages.Trained:
        assert self._work is not None
        batch = self._work.batch(request.step)
        self._commit = None
        self._commit = self._runtime.step(
            request.turn, batch, self._timelines[-1][0] if request.traced else None
        )
        self._at = request.step + 1
        return messages.Trained(commit=self._commit)

    def _reached(self, request: messages.TellReached) -> messages.Reached:
        return messages.Reached(at=self._at, commit=self._commit)

    def _finish(self, request: messages.FinishStep) -> None:
        assert self._at is not None
        self._commit = self._runtime.finish(request.commit)
        self._at += 1

    def _hold(self, request: messages.HoldState) -> messages.HeldState:
        if self._at is not None:
            self._inventory.keep(self._at, self._runtime.held())
        return messages.HeldState(
            at=self._inventory.memory_step, leaves=self._inventory.memory
        )

    def _find_saves(self, request: messages.FindSaves) -> messages.FoundSaves:
        directory = request.keeping.at(file_name(self._worker))
        return messages.FoundSaves(
            saves=[*self._inventory.look(directory, self._needed())]
        )

    def _needs(self, request: messages.TellNeeds) -> messages.NeededState:
        leaves = {leaf: leaf_bytes(entry) for leaf, entry in self._needed().items()}
        return messages.NeededState(at=self._at, leaves=leaves)

    def _collect(self, request: messages.CollectLeaves) -> messages.Collected:
        if request.own.get("cloud"):
            self._open_store(request.keeping, request.save[0])
        return collect_leaves(request, self._inventory, self.peers, self._needed())

    def _open_store(self, keeping: CheckpointStorage, step: int) -> None:
        store = keeping.store()
        assert store is not None
        directory = keeping.at(file_name(self._worker))
        self._inventory.fetch_from(store, step, directory)

    def _place(self, request: messages.PlaceState) -> None:
        if self._at != request.step:
            values = self._inventory.taken
            self._inventory.let_go()
            self._runtime.restore(lambda entry: from_leaves(values, entry))
            self._at, self._commit = request.step, None
        self._inventory.forget()

    def _needed(self) -> dict[str, Entry]:
        """The entry of each leaf that the stages' state is made of, once built."""
        if self._work is None:
            return {}
        return {
            leaf: entry
            for entry in self._runtime.needed()
            for leaf in leaf_names(entry)
        }

    def _time(self, request: messages.TellTime) -> messages.ClockTime:
        return messages.ClockTime(now_s=time.perf_counter())

    def _spans(self, request: messages.TellSpans) -> messages.TracedActions:
        spans = [
            span
            for timeline, members in self._timelines
            for span in timeline.spans()
            if members.worker_of(span.node, span.device) == self._worker
        ]
        return messages.TracedActions(
            actions=format_program(tuple(span.action for span in spans)),
            spans=[(s.node, s.device, s.start_s, s.end_s) for s in spans],
        )

    def _evaluate(self, request: messages.Evaluate) -> messages.Evaluated:
        assert self._work is not None
        batch = self._work.validation(request.batch)
        losses = self._runtime.evaluate(request.turn, batch)
        return messages.Evaluated(losses=losses, num_tokens=batch[1].size)

    def _predict(self, request: messages.Predict) -> messages.Predicted:
        found_V = self._runtime.next_logits(request.turn, request.tokens)
        return messages.Predicted(logits=None if found_V is None else found_V.tolist())

    def _saving_state(self, request: messages.TellSaving) -> messages.SavingState:
        return self._saving.state(self._runtime.saves)

    def _save(self, request: messages.SaveState) -> None:
        self._saving.save(request, [*self._runtime.entries()])

    def _open_copies(self) -> PeerReplication:
        assert self._bootstrap is not None, _ALONE
        bootstrap = self._bootstrap
        return PeerReplication(
            file_name(bootstrap.worker),
            bootstrap.host,
            bootstrap.secret,
            bootstrap.silence_s,
        )

    @property
    def _runtime(self) -> StageRuntime:
        assert self._work is not None, "build first"
        return self._work.runtime


HANDLERS: dict[type[Request[Any]], Callable[[WorkerService, Any], Message | None]] = {
    messages.Coordinate: WorkerService._coordinate,
    messages.Build: WorkerService._build,
    messages.CompileAhead: WorkerService._compile_ahead,
    messages.Listen: WorkerService._listen,
    messages.Join: WorkerService._join,
    messages.Compile: WorkerService._compile,
    messages.Initialise: WorkerService._initialise,
    messages.Train: WorkerService._train,
    messages.TellReached: WorkerService._reached,
    messages.FinishStep: WorkerService._finish,
    messages.HoldState: WorkerService._hold,
    messages.FindSaves: WorkerService._find_saves,
    messages.TellNeeds: WorkerService._needs,
    messages.CollectLeaves: WorkerService._collect,
    messages.PlaceState: WorkerService._place,
    messages.TellTime: WorkerService._time,
    messages.TellSpans: WorkerService._spans,
    messages.Evaluate: WorkerService._evaluate,
    messages.Predict: WorkerService._predict,
    messages.TellSaving: WorkerService._saving_state,
    messages.KeepCopies: lambda service, asked: service._saving.keep_copies(asked),
    messages.SendCopies: lambda service, asked: service._saving.send_copies(asked),
    messages.SaveState: WorkerService._save,
    messages.AwaitSaved: lambda service, asked: service._saving.wait(asked),
    messages.Leave: lambda service, asked: service.close(),
}
