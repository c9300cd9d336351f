# SPDX-License-Identifier: Apache-2.0
"""Handles each request to a worker, in whichever process the worker is.

Owns the worker's parts (its stages, its data, its connections to peers, its saves, its
salvaged state, its compiling ahead) and one handler for each request. Errors are
raised. Does not own how requests arrive (`server.py`, `launchers/in_process.py`), what
concerns the whole process (`server.py`), nor making the worker's `Work`
(`hetjax/training/worker.py`).
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np

from hetjax.checkpoint.format import Entry, leaf_names
from hetjax.comm.connections import SILENCE_S
from hetjax.comm.peers import Peers
from hetjax.comm.pull import PullServer
from hetjax.data.batches import Batch, num_targets
from hetjax.plans.worker_map import WorkerMap
from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.execution.executor import ActionObserver
from hetjax.runtime.execution.serving import ServingStages
from hetjax.runtime.execution.stage_runtime import StageRuntime
from hetjax.runtime.execution.step_clock import StepClock, WorkerTimes
from hetjax.runtime.execution.tracer import Timeline
from hetjax.runtime.rpc import schema, serving_schema
from hetjax.runtime.rpc.gathering_schema import (
    PartSent,
    PartSize,
    SendPart,
    TellPartSize,
)
from hetjax.runtime.rpc.message import AnyRequest
from hetjax.runtime.rpc.schema import Json, Message
from hetjax.runtime.worker.background import Background, Warmer
from hetjax.runtime.worker.bootstrap import WorkerBootstrap
from hetjax.runtime.worker.checkpoint_folder import CheckpointFolder
from hetjax.runtime.worker.duties import Progress, begun, committed, done, rerouted
from hetjax.runtime.worker.host_group import HostGroup
from hetjax.runtime.worker.state_inventory import (
    StateInventory,
    collect_leaves,
    from_leaves,
    leaf_bytes,
)
from hetjax.schedule.programs.action import format_program

_CONNECT_S = 120.0  # until all peers have called: they may be starved


class Work(Protocol):
    """What a worker works on: its stages and its own copy of the data."""

    @property
    def runtime(self) -> StageRuntime: ...

    def close(self) -> None:
        """Release it: something else is built, or the worker ends."""
        ...

    def batch(self, step: int) -> Batch:
        """Return the global batch of a training step."""
        ...

    def validation(self, number: int) -> Batch:
        """Return one of the global batches of an evaluation."""
        ...


class WorkerService:
    """A worker: `answer` carries out requests.

    `make` makes its `Work`, `warm` compiles the same ahead. Without a `bootstrap` the
    worker is alone. `tell` is called as programs are compiled.
    """

    def __init__(
        self,
        worker: str,
        make: Callable[[Json], Work],
        *,
        bootstrap: WorkerBootstrap | None = None,
        warm: Callable[[Json], None] = lambda settings: None,
        tell: Callable[[schema.Compiling], None] = lambda compiling: None,
    ) -> None:
        self._worker, self._bootstrap = worker, bootstrap
        self._make, self._warm_up, self._tell = make, warm, tell
        self._warmer = Warmer()
        self._compiling: Background | None = None  # started with the stages
        self.peers: Peers | None = None
        self._work: Work | None = None
        self._timelines: list[tuple[Timeline, WorkerMap]] = []  # one for each plan
        self._clock = StepClock()  # of the last plan
        self._progress = Progress()
        self._inventory = StateInventory()
        self._folder = CheckpointFolder(worker)
        self._server: PullServer | None = None  # lives as long as the process
        silence_s = SILENCE_S if bootstrap is None else bootstrap.silence_s
        self.host_group = HostGroup(
            worker, "" if bootstrap is None else bootstrap.host, silence_s
        )

    def answer(self, request: AnyRequest) -> Message:
        """Carry out a request; raise PeerLost, BadInput, OutOfOrder, or other error."""
        self._progress = begun(self._progress, request)
        answer = HANDLERS[type(request)](self, request) or schema.Done()
        self._progress = done(self._progress, request)
        return answer

    def close(self) -> None:
        """Finish pending writes, and release everything."""
        with ExitStack() as stack:
            stack.callback(self._folder.close)
            if self._work is not None:
                stack.callback(self._work.close)

    def _coordinate(self, request: schema.Coordinate) -> schema.Address:
        return schema.Address(address=self.host_group.coordinate())

    def _build(self, request: schema.Build) -> None:
        if request.world is not None:
            self.host_group.enter(request.world)
        if self._work is not None:
            self._work.close()
        self._warmer.clear()
        self._work = None  # `HoldState` may have kept its state
        self._work = self._make(request.settings)
        self._compiling = None
        if request.compiles and request.world is None:  # else hosts would diverge
            self._compiling = Background(self._runtime.compile, "compile")
        self._begin_plan()

    def _begin_plan(self) -> None:
        """Start to record the actions of another plan."""
        self._timelines.append((Timeline(self._runtime.plan), self._runtime.members))
        self._clock = StepClock()

    def _reroute(self, request: schema.Reroute) -> None:
        self._runtime.reroute(request.num_microbatches)
        self._progress = rerouted(self._progress, self._runtime.is_behind)
        self._begin_plan()

    def _compile_ahead(self, request: schema.CompileAhead) -> None:
        self._warmer.add(lambda: self._warm_up(request.settings))

    def _ahead(self, request: schema.TellCompilingAhead) -> schema.CompilingAhead:
        return schema.CompilingAhead(is_done=self._warmer.is_done)

    def _listen(self, request: schema.Listen) -> schema.Address:
        own = self._own
        self.peers = Peers(
            own.worker,
            own.listen,
            own.secret,
            own.silence_s,
            own.incarnation,
            tls=own.tls,
        )
        return schema.Address(address=self.peers.address)

    def _join(self, request: schema.Join) -> None:
        assert self.peers is not None, "listen first"
        self.peers.connect(request.addresses, _CONNECT_S)
        if request.transport == "transfer" and self._server is None:
            self._server = PullServer(self._own.host, self._own.secret)
        server = self._server if request.transport == "transfer" else None
        self._runtime.join(self.peers, request.epoch, server)

    def _compile(self, request: schema.Compile) -> None:
        self._wait_compiled()
        self._runtime.compile(
            lambda done, of: self._tell(schema.Compiling(num_done=done, num_all=of))
        )

    def _wait_compiled(self) -> None:
        """Wait for background compiling, so that nothing is compiled twice."""
        begun, self._compiling = self._compiling, None
        if begun is not None:
            begun.wait()

    def _compiled(self, request: schema.TellCompiledBytes) -> schema.CompiledBytes:
        found = self._runtime.temp_bytes().items()
        return schema.CompiledBytes(stages=[(*key, passes) for key, passes in found])

    def _initialise(self, request: schema.Initialise) -> None:
        self._inventory.forget()
        self._wait_compiled()
        self._runtime.initialise(request.seed)

    def _train(self, request: schema.Train) -> schema.Trained:
        assert self._work is not None
        batch = self._work.batch(request.step)
        observer: ActionObserver | None = None
        if request.traced:
            observer = self._timelines[-1][0]
        elif request.timed:
            observer = self._clock.begin(request.step)
        commit = self._runtime.step(
            request.turn, batch, observer, request.loss_scale, request.checks
        )
        self._progress = committed(request.step, commit)
        return self._trained(request.step, commit)

    def _trained(self, step: int, commit: StepCommit) -> schema.Trained:
        """Return the answer, with the times of an earlier step if they are complete."""
        if (timed := self._clock.pop_finished(step)) is None:
            return schema.Trained(commit=commit)
        sent = [] if self.peers is None else self.peers.pace.pop_s_per_byte()
        times = WorkerTimes(step=timed.step, worked=timed.worked(), sent=sent)
        return schema.Trained(commit=commit, times=times)

    def _leave_out(self, request: schema.LeaveOut) -> None:
        if self._progress.at == request.step:  # else a repeated request
            self._runtime.skip()

    def _check_state(self, request: schema.CheckState) -> schema.CheckedState:
        return schema.CheckedState(stages=[*self._runtime.numbers(request.digests)])

    def _drop(self, request: schema.DropState) -> None:
        self._inventory.forget()
        self._folder.discard_after(request.storage, request.kept)

    def _reached(self, request: schema.TellReached) -> schema.Reached:
        return schema.Reached(
            at=self._progress.at,
            commit=self._progress.commit,
            is_aborted=self._work is not None and self._runtime.is_aborted,
        )

    def _finish(self, request: schema.FinishStep) -> None:
        self._runtime.finish(request.commit)

    def _hold(self, request: schema.HoldState) -> schema.HeldState:
        if self._progress.at is not None:
            self._inventory.keep(self._progress.at, self._runtime.held())
        return schema.HeldState(
            at=self._inventory.memory_step, leaves=self._inventory.memory
        )

    def _find_saves(self, request: schema.FindSaves) -> schema.FoundSaves:
        self._folder.keep_all()
        self._folder.hold(request.storage)
        storage, path = request.storage, self._folder.path(request.storage)
        # a machine that cannot log in there must not take part: its saves would fail
        storage.store(is_tried=False)
        found = self._inventory.look(path, self._needed(), storage.key(), storage.run)
        place = self._folder.own_path(storage)
        return schema.FoundSaves(saves=[*found], place=place)

    def _needs(self, request: schema.TellNeeds) -> schema.NeededState:
        leaves = {leaf: leaf_bytes(entry) for leaf, entry in self._needed().items()}
        return schema.NeededState(at=self._progress.at, leaves=leaves)

    def _collect(self, request: schema.CollectLeaves) -> schema.Collected:
        if request.own.get("cloud"):
            storage = request.storage
            store, key = storage.store(is_tried=False), storage.key()
            assert store is not None
            step, directory = request.save[0], self._folder.path(storage)
            self._inventory.fetch_from(store, step, directory, key, storage.run)
        return collect_leaves(request, self._inventory, self.peers, self._needed())

    def _place(self, request: schema.PlaceState) -> None:
        if self._progress.at != request.step:
            values = self._inventory.taken
            self._inventory.let_go()
            self._wait_compiled()
            self._runtime.restore(lambda entry: from_leaves(values, entry))
        self._inventory.forget()

    def _needed(self) -> dict[str, Entry]:
        """Return the entry of each leaf of the stages' state, once they are built."""
        if self._work is None:
            return {}
        return {
            leaf: entry
            for entry in self._runtime.needed()
            for leaf in leaf_names(entry)
        }

    def _time(self, request: schema.TellTime) -> schema.ClockTime:
        return schema.ClockTime(now_s=time.perf_counter())

    def _spans(self, request: schema.TellSpans) -> schema.TracedActions:
        spans = [
            span
            for timeline, members in self._timelines
            for span in timeline.spans()
            if members.worker_of(span.node, span.device) == self._worker
        ]
        return schema.TracedActions(
            actions=format_program(tuple(span.action for span in spans)),
            spans=[(s.node, s.device, s.start_s, s.end_s) for s in spans],
        )

    def _evaluate(self, request: schema.Evaluate) -> schema.Evaluated:
        assert self._work is not None
        batch = self._work.validation(request.batch)
        losses = self._runtime.evaluate(request.turn, batch)
        return schema.Evaluated(losses=losses, num_tokens=num_targets(batch))

    def _predict(self, request: schema.Predict) -> schema.NextLogits:
        found_V = self._runtime.next_logits(request.turn, request.tokens)
        return schema.NextLogits(logits=None if found_V is None else found_V.tolist())

    def _score(self, request: serving_schema.Score) -> serving_schema.Scored:
        inputs_GL, targets_GL = (
            serving_schema.text_array(text, np.int32, request.num_rows)
            for text in (request.inputs, request.targets)
        )
        found = self._serving_stages.row_losses(request.turn, inputs_GL, targets_GL)
        return serving_schema.Scored(losses=found)

    def _continue_text(
        self, request: serving_schema.ContinueText
    ) -> serving_schema.ContinuedText:
        found_V = self._serving_stages.next_logits(request.turn, request.piece)
        text = None if found_V is None else serving_schema.array_text(found_V)
        return serving_schema.ContinuedText(logits=text)

    def _saving_state(self, request: schema.TellSaving) -> schema.SavingState:
        return self._folder.state(self._runtime.saves)

    def _keep_copies(self, request: schema.KeepCopies) -> schema.Address:
        address = self._folder.keep_copies(request.storage, self._own)
        return schema.Address(address=address)

    def _send_copies(self, request: schema.SendCopies) -> None:
        self._folder.send_copies(request)

    def _part_size(self, request: TellPartSize) -> PartSize:
        return self._folder.part_size(request)

    def _send_part(self, request: SendPart) -> PartSent:
        return self._folder.send_part(request, self._own)

    def _save(self, request: schema.SaveState) -> None:
        self._folder.save(request, [*self._runtime.entries()])

    def _await_saved(self, request: schema.AwaitSaved) -> None:
        self._folder.wait()

    @property
    def _own(self) -> WorkerBootstrap:
        assert self._bootstrap is not None, "a worker without a bootstrap has no peers"
        return self._bootstrap

    @property
    def _serving_stages(self) -> ServingStages:
        assert isinstance(self._runtime, ServingStages), "built to be trained"
        return self._runtime

    @property
    def _runtime(self) -> StageRuntime:
        assert self._work is not None, "build first"
        return self._work.runtime


HANDLERS: dict[type[AnyRequest], Callable[[WorkerService, Any], Message | None]] = {
    schema.Coordinate: WorkerService._coordinate,
    schema.Build: WorkerService._build,
    schema.CompileAhead: WorkerService._compile_ahead,
    schema.TellCompilingAhead: WorkerService._ahead,
    schema.Listen: WorkerService._listen,
    schema.Join: WorkerService._join,
    schema.Compile: WorkerService._compile,
    schema.TellCompiledBytes: WorkerService._compiled,
    schema.Initialise: WorkerService._initialise,
    schema.Train: WorkerService._train,
    schema.LeaveOut: WorkerService._leave_out,
    schema.CheckState: WorkerService._check_state,
    schema.DropState: WorkerService._drop,
    schema.Reroute: WorkerService._reroute,
    schema.TellReached: WorkerService._reached,
    schema.FinishStep: WorkerService._finish,
    schema.HoldState: WorkerService._hold,
    schema.FindSaves: WorkerService._find_saves,
    schema.TellNeeds: WorkerService._needs,
    schema.CollectLeaves: WorkerService._collect,
    schema.PlaceState: WorkerService._place,
    schema.TellTime: WorkerService._time,
    schema.TellSpans: WorkerService._spans,
    schema.Evaluate: WorkerService._evaluate,
    schema.Predict: WorkerService._predict,
    serving_schema.Score: WorkerService._score,
    serving_schema.ContinueText: WorkerService._continue_text,
    schema.TellSaving: WorkerService._saving_state,
    schema.KeepCopies: WorkerService._keep_copies,
    schema.SendCopies: WorkerService._send_copies,
    schema.SaveState: WorkerService._save,
    schema.AwaitSaved: WorkerService._await_saved,
    TellPartSize: WorkerService._part_size,
    SendPart: WorkerService._send_part,
    schema.Leave: lambda service, asked: service.close(),
}
