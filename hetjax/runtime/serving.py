# SPDX-License-Identifier: Apache-2.0
"""A worker process at its controller's service.

Owns the loop from request to reply, and that the process ends with its controller. Does
not own what a step is (`stage_runtime.py`), nor where settings and data come from:
`Work` is made by a room above.
"""

import json
import os
import queue
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hetjax.checkpoint.format import Entry, leaf_names
from hetjax.checkpoint.replication import PeerReplication
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.comm.links import SILENCE_S
from hetjax.comm.peers import PeerLost, Peers
from hetjax.comm.pull import PullServer
from hetjax.errors import BadInput
from hetjax.plans.members import file_name
from hetjax.runtime.control import AnyRequest, Line
from hetjax.runtime.feeding import Batch
from hetjax.runtime.mates import Mates
from hetjax.runtime.messages import (
    Address,
    AwaitSaved,
    BreakOff,
    Build,
    ClockTime,
    Collected,
    CollectLeaves,
    Compile,
    CompileAhead,
    Compiling,
    Coordinate,
    Done,
    Evaluate,
    Evaluated,
    Failed,
    FindSaves,
    FinishStep,
    FoundSaves,
    HeldState,
    HoldState,
    Initialise,
    Join,
    Json,
    KeepCopies,
    Leave,
    Listen,
    Lost,
    Message,
    NeededState,
    Noticed,
    PlaceState,
    Predict,
    Predicted,
    Reached,
    Refused,
    SaveState,
    SavingState,
    SendCopies,
    TellNeeds,
    TellReached,
    TellSaving,
    TellSpans,
    TellTime,
    TracedActions,
    Train,
    Trained,
    Warned,
)
from hetjax.runtime.outcome import StepCommit
from hetjax.runtime.salvage import Salvage, carry_out, from_leaves, leaf_bytes
from hetjax.runtime.saving import Saving
from hetjax.runtime.stage_runtime import StageRuntime
from hetjax.runtime.timeline import Timeline
from hetjax.runtime.warming import Warmer
from hetjax.schedule.action import format_program

_CONNECT_S = 120.0  # until all peers have called: they may be starved


@dataclass(frozen=True, kw_only=True, slots=True)
class Post:
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

    def text(self) -> str:
        """One line, for a pipe that nobody else reads."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields | {"secret": self.secret.hex()})


def read_post(text: str) -> Post:
    """Inverse of `Post.text`."""
    fields = json.loads(text)
    return Post(**(fields | {"secret": bytes.fromhex(fields["secret"])}))


class Work(Protocol):
    """What a worker works on: its stages and its own copy of the data."""

    @property
    def runtime(self) -> StageRuntime: ...

    def batch(self, step: int) -> Batch:
        """The global batch of a training step."""
        ...

    def validation(self, number: int) -> Batch:
        """One of the global batches of an evaluation."""
        ...


# Calls what it is given for each notice, within `with`
Watching = Callable[[Callable[[Noticed], None]], AbstractContextManager[object]]


def serve(
    post: Post,
    make: Callable[[Json], Work],
    warm: Callable[[Json], None] = lambda settings: None,
    watching: Watching = lambda tell: nullcontext(),
) -> None:
    """Do as the controller says until it ends the line.

    `make` makes what the worker works on; `warm` compiles its programs, as may be asked
    ahead of it. What `watching` hears is passed on at once, whatever goes on meanwhile.
    """
    server = _Server(post, make, warm)
    with watching(server.tell_notice):
        server.run()


class _Server:
    def __init__(
        self,
        post: Post,
        make: Callable[[Json], Work],
        warm: Callable[[Json], None],
    ) -> None:
        self._post, self._make, self._warm_up = post, make, warm
        self._warmer = Warmer()
        self._requests: queue.SimpleQueue[tuple[int, AnyRequest]] = queue.SimpleQueue()
        self._peers: Peers | None = None
        self._work: Work | None = None
        self._timeline: Timeline | None = None
        self._at: int | None = None  # steps that the state has behind it
        self._commit: StepCommit | None = None  # of the last one, if done here
        self._salvage = Salvage()
        self._saving = Saving(file_name(post.worker), self._open_copies)
        self._server: PullServer | None = None  # once made, for as long as the process
        host = post.listen.rpartition(":")[0]
        self._mates = Mates(post.worker, host, post.silence_s)
        warnings.showwarning = self._tell_warning
        self._line = Line(
            post.controller,
            post.worker,
            post.secret,
            self._hear,
            self._end,
            post.silence_s,
        )

    def run(self) -> None:
        while True:
            self._number, request = self._requests.get()
            if isinstance(request, Leave):
                break
            answer = self._answer(request)
            self._line.send(self._number, replace(answer, epoch=request.epoch))
            self._mates.done(_lost_in(answer, self._post.worker), self._line.close)
        if self._work is not None:
            self._work.runtime.leave()
        self._saving.close()
        self._mates.leave()
        self._line.send(self._number, Done(epoch=request.epoch))
        self._line.close()

    def tell_notice(self, notice: Noticed) -> None:
        self._line.send(0, notice)

    def _tell_warning(self, message: Any, *_: object) -> None:
        """Warnings are the controller's to show."""
        self._line.send(0, Warned(text=str(message)))

    def _hear(self, number: int, request: AnyRequest) -> None:
        """Called by the line's thread: breaking off cannot wait for the step's end."""
        if not isinstance(request, BreakOff):
            self._mates.begin(number, type(request))
            self._requests.put((number, request))
            return
        if self._peers is not None:
            self._peers.mailbox.lose(request.worker, request.reason)
        self._mates.break_off()

    def _end(self, reason: str) -> None:
        with suppress(OSError):  # a full disk under the log must not keep us here
            print(f"worker {self._post.worker}: controller {reason}", file=sys.stderr)
        os._exit(1)  # nobody is left to work for; threads may be anywhere

    def _answer(self, request: AnyRequest) -> Message:
        try:
            return _HANDLERS[type(request)](self, request) or Done()
        except PeerLost as lost:
            return Lost(worker=lost.peer, reason=lost.reason)
        except BadInput as bad:
            return Refused(got=bad.got, allowed=bad.allowed, fix=bad.fix)
        except Exception as error:
            with suppress(OSError):
                traceback.print_exc()
            return Failed(error=f"{type(error).__name__}: {error}")

    def _coordinate(self, request: Coordinate) -> Address:
        return Address(address=self._mates.coordinate())

    def _build(self, request: Build) -> None:
        if request.world is not None:
            self._mates.enter(request.world)
        if self._work is not None:
            self._work.runtime.leave()
        self._warmer.clear()
        self._work = self._at = None  # what it held may have been kept: `HoldState`
        self._work = self._make(request.settings)
        self._timeline = Timeline(self._runtime.plan)

    def _compile_ahead(self, request: CompileAhead) -> None:
        self._warmer.add(lambda: self._warm_up(request.settings))

    def _listen(self, request: Listen) -> Address:
        post = self._post
        self._peers = Peers(post.worker, post.listen, post.secret, post.silence_s)
        return Address(address=self._peers.address)

    def _join(self, request: Join) -> None:
        assert self._peers is not None
        self._peers.connect(request.addresses, _CONNECT_S)
        if request.transport == "transfer" and self._server is None:
            host = self._post.listen.rpartition(":")[0]
            self._server = PullServer(host, self._post.secret)
        server = self._server if request.transport == "transfer" else None
        self._runtime.join(self._peers, request.epoch, server)

    def _compile(self, request: Compile) -> None:
        def tell(num_done: int, num_all: int) -> None:
            news = Compiling(num_done=num_done, num_all=num_all, epoch=request.epoch)
            self._line.send(self._number, news)

        self._runtime.compile(tell)

    def _initialise(self, request: Initialise) -> None:
        self._salvage.forget()
        self._runtime.initialise(request.seed)
        self._at = 0

    def _train(self, request: Train) -> Trained:
        assert self._work is not None
        batch = self._work.batch(request.step)
        self._commit = None
        self._commit = self._runtime.step(
            request.turn, batch, self._timeline if request.traced else None
        )
        self._at = request.step + 1
        return Trained(commit=self._commit)

    def _reached(self, request: TellReached) -> Reached:
        return Reached(at=self._at, commit=self._commit)

    def _finish(self, request: FinishStep) -> None:
        assert self._at is not None
        self._commit = self._runtime.finish(request.commit)
        self._at += 1

    def _hold(self, request: HoldState) -> HeldState:
        if self._at is not None:
            self._salvage.keep(self._at, self._runtime.held())
        return HeldState(at=self._salvage.memory_step, leaves=self._salvage.memory)

    def _find_saves(self, request: FindSaves) -> FoundSaves:
        directory = request.keeping.at(file_name(self._post.worker))
        return FoundSaves(saves=[*self._salvage.look(directory, self._needed())])

    def _needs(self, request: TellNeeds) -> NeededState:
        leaves = {leaf: leaf_bytes(entry) for leaf, entry in self._needed().items()}
        return NeededState(at=self._at, leaves=leaves)

    def _collect(self, request: CollectLeaves) -> Collected:
        assert self._peers is not None
        if request.own.get("cloud"):
            self._open_store(request.keeping, request.save[0])
        return carry_out(request, self._salvage, self._peers, self._needed())

    def _open_store(self, keeping: CheckpointStorage, step: int) -> None:
        store = keeping.store()
        assert store is not None
        directory = keeping.at(file_name(self._post.worker))
        self._salvage.fetch_from(store, step, directory)

    def _place(self, request: PlaceState) -> None:
        if self._at != request.step:
            values = self._salvage.taken
            self._salvage.let_go()
            self._runtime.restore(lambda entry: from_leaves(values, entry))
            self._at, self._commit = request.step, None
        self._salvage.forget()

    def _needed(self) -> dict[str, Entry]:
        """The entry of each leaf that the island's state is made of, once it is."""
        if self._work is None:
            return {}
        return {
            leaf: entry
            for entry in self._runtime.needed()
            for leaf in leaf_names(entry)
        }

    def _time(self, request: TellTime) -> ClockTime:
        return ClockTime(now_s=time.perf_counter())

    def _spans(self, request: TellSpans) -> TracedActions:
        assert self._timeline is not None
        members = self._runtime.members
        spans = [
            span
            for span in self._timeline.spans()
            if members.worker_of(span.node, span.device) == self._post.worker
        ]
        return TracedActions(
            actions=format_program(tuple(span.action for span in spans)),
            spans=[(span.device, span.start_s, span.end_s) for span in spans],
        )

    def _evaluate(self, request: Evaluate) -> Evaluated:
        assert self._work is not None
        batch = self._work.validation(request.batch)
        losses = self._runtime.evaluate(request.turn, batch)
        return Evaluated(losses=losses, num_tokens=batch[1].size)

    def _predict(self, request: Predict) -> Predicted:
        found_V = self._runtime.next_logits(request.turn, request.tokens)
        return Predicted(logits=None if found_V is None else found_V.tolist())

    def _saving_state(self, request: TellSaving) -> SavingState:
        return self._saving.state(self._runtime.saves)

    def _save(self, request: SaveState) -> None:
        self._saving.save(request, [*self._runtime.entries()])

    def _open_copies(self) -> PeerReplication:
        post = self._post
        host = post.listen.rpartition(":")[0]
        return PeerReplication(
            file_name(post.worker), host, post.secret, post.silence_s
        )

    @property
    def _runtime(self) -> StageRuntime:
        assert self._work is not None, "build first"
        return self._work.runtime


def _lost_in(answer: Message, own: str) -> str | None:
    """Whom the answer tells to be lost; one that has failed is of no more use."""
    if isinstance(answer, Failed):
        return own
    return answer.worker if isinstance(answer, Lost) else None


_HANDLERS: dict[type[AnyRequest], Callable[[_Server, Any], Message | None]] = {
    Coordinate: _Server._coordinate,
    Build: _Server._build,
    CompileAhead: _Server._compile_ahead,
    Listen: _Server._listen,
    Join: _Server._join,
    Compile: _Server._compile,
    Initialise: _Server._initialise,
    Train: _Server._train,
    TellReached: _Server._reached,
    FinishStep: _Server._finish,
    HoldState: _Server._hold,
    FindSaves: _Server._find_saves,
    TellNeeds: _Server._needs,
    CollectLeaves: _Server._collect,
    PlaceState: _Server._place,
    TellTime: _Server._time,
    TellSpans: _Server._spans,
    Evaluate: _Server._evaluate,
    Predict: _Server._predict,
    TellSaving: _Server._saving_state,
    KeepCopies: lambda server, asked: server._saving.keep_copies(asked),
    SendCopies: lambda server, asked: server._saving.send_copies(asked),
    SaveState: _Server._save,
    AwaitSaved: lambda server, asked: server._saving.wait(asked),
}
