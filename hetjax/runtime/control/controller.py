# SPDX-License-Identifier: Apache-2.0
"""Controls a plan's workers: sends requests and collects the answers.

Owns epochs, turns, and the step as its caller sees it. Out of the data path:
activations, gradients, batches and checkpoints never come here. Does not own the start
of worker processes (`launchers/`), nor their work (`runtime/worker/`).
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hetjax.checkpoint.format import AttemptNames
from hetjax.checkpoint.recovery_plan import Save
from hetjax.checkpoint.replication import copy_targets
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.cluster.cluster import Node
from hetjax.comm.pull import check_fits
from hetjax.errors import BadInput
from hetjax.mesh.multihost import World
from hetjax.plans.plan import Plan, StageKey
from hetjax.plans.worker_map import WorkerMap, file_name, node_of
from hetjax.runtime.control.step_timing import StepTiming
from hetjax.runtime.execution.checking.checks import (
    NO_CHECKS,
    Disagreement,
    StepChecks,
    disagreements,
)
from hetjax.runtime.execution.commit import StepCommit, total_loss
from hetjax.runtime.rpc import schema
from hetjax.runtime.rpc.limits import moving_s
from hetjax.runtime.rpc.schema import Json, Request, TransportName
from hetjax.runtime.rpc.worker_connections import Answer, WorkerConnections, WorkerLost
from hetjax.schedule.programs.action import parse_program
from hetjax.schedule.simulation.trace import Span


class Controller:
    """A plan on workers, one per host or one for all hosts, reached by `connections`.

    Nodes of the plan that are not among `nodes` have one host. Every method may raise
    WorkerLost; the survivors then keep their state and wait for `connect`.
    """

    def __init__(
        self, plan: Plan, connections: WorkerConnections, nodes: Sequence[Node] = ()
    ) -> None:
        self.connections = connections
        self.attempts: dict[int, str] = {}  # of each save, by step
        self.new_attempts = AttemptNames()  # newer than all that it has noted
        self.saved: int | None = None  # newest step that all workers have saved
        # False if the last recovery found neither `saved` nor a newer save whole on
        # disks or in the store
        self.is_kept = True
        # the newest complete save stays until there is a newer one: a worker that left
        # with a part of it may come back
        self.safe: Save | None = None
        self.is_not_finite = False  # whether the last state to be saved was not finite
        self._saving = 0, list[str]()  # step and workers of the last save started
        self._expected_save_s: float | None = None  # until that save is written
        self._copying: tuple[int, int] | None = None  # epoch and copies last ordered
        self._turn = 0
        self.timing, self.predicts_steps = StepTiming(), False  # from `plan.predicted`
        self.state_bytes: Mapping[str, int] = {}  # by worker, once reported
        self.adopt(plan, nodes)

    def adopt(self, plan: Plan, nodes: Sequence[Node] = ()) -> None:
        """Continue with this plan, once its workers are built and connected."""
        self.plan, self._is_first_step = plan, True
        self.members = WorkerMap(plan, tuple(nodes), self.connections.only)
        self.workers = list(self.members.workers)

    def build(
        self,
        settings: Json,
        workers: Sequence[str] | None = None,
        *,
        compiles: bool = False,
    ) -> None:
        """Let these workers (default: all) build their stages from these settings.

        The hosts of a node that has several are joined first, on a port of the first.
        With `compiles`, workers start at once to compile what `compile` then waits for.
        """
        asked = self.workers if workers is None else workers
        worlds = self._worlds(asked)
        request = schema.Build(settings=settings, compiles=compiles)
        self.connections.ask({w: replace(request, world=worlds.get(w)) for w in asked})

    def reroute(self, plan: Plan, workers: Sequence[str]) -> None:
        """Continue with this plan, which has the same replicas, but other idle ones.

        These `workers` were built for a plan that differs only in the microbatches
        (`plans/rerouting.py`). Workers without a stage that takes part keep their
        state, and get no requests for steps. The others have to be connected.
        """
        self.adopt(plan, self.members.nodes)
        counts = [replica.num_microbatches for replica in plan.replicas]
        request = schema.Reroute(num_microbatches=counts)
        self.connections.ask(dict.fromkeys(workers, request))

    def compile_ahead(self, settings: Json, plan: Plan) -> None:
        """Let workers compile in the background what this plan will require of them."""
        used = plan.nodes
        there = [worker for worker in self.workers if node_of(worker) in used]
        self.begin_compiling(settings, there)

    def begin_compiling(self, settings: Json, workers: Sequence[str]) -> None:
        """Let these workers compile in the background what the settings require."""
        request = schema.CompileAhead(settings=settings)
        self.connections.ask(dict.fromkeys(workers, request))

    def are_compiled(self, workers: Sequence[str]) -> bool:
        """Return whether these workers have finished compiling in the background."""
        request = schema.TellCompilingAhead()
        answers = self.connections.ask(dict.fromkeys(workers, request))
        return all(answer.is_done for answer in answers.values())

    def _worlds(self, asked: Sequence[str]) -> dict[str, World]:
        """Return the World of each host of a node that has several hosts."""
        several = [h for h in self._hosts() if len(h) > 1 and {*h} & {*asked}]
        at = self.connections.ask({hosts[0]: schema.Coordinate() for hosts in several})
        return {
            worker: World(address=at[hosts[0]].address, count=len(hosts), index=index)
            for hosts in several
            for index, worker in enumerate(hosts)
        }

    def _hosts(self) -> list[tuple[str, ...]]:
        """Return the workers of each node."""
        nodes = dict.fromkeys(map(node_of, self.workers))
        return [self.members.hosts(node) for node in nodes]

    def connect(
        self, transport: TransportName = "sockets", others: Sequence[str] = ()
    ) -> None:
        """Join the workers to each other, as a new epoch.

        `others` are workers outside the plan, which may give the state that they hold.
        Raises BadInput if the transport's tags cannot tell all messages of the plan
        apart, or if it cannot reach stages on several hosts.
        """
        self.connections.epoch += 1
        if self.connections.only is not None:
            return  # there are no other workers
        if transport == "transfer":
            self._check_one_host_each()
            replicas = self.plan.replicas
            check_fits(
                num_replicas=len(replicas),
                num_stages=max(len(r.stages) for r in replicas),
                num_microbatches=max(r.num_microbatches for r in replicas),
            )
        workers = [*self.workers, *others]
        answers = self.connections.ask(dict.fromkeys(workers, schema.Listen()))
        at = {worker: answers[worker].address for worker in workers}
        joins = {}
        for worker in workers:
            peers = {w: address for w, address in at.items() if w != worker}
            joins[worker] = schema.Join(addresses=peers, transport=transport)
        self.connections.ask(joins)

    def compile(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile the programs of all stages."""
        counts: dict[str, tuple[int, int]] = {}

        def add_progress(worker: str, compiling: schema.Compiling) -> None:
            counts[worker] = compiling.num_done, compiling.num_all
            if progress is not None and len(counts) == len(self.workers):
                progress(*map(sum, zip(*counts.values(), strict=True)))

        requests = dict.fromkeys(self.workers, schema.Compile())
        self.connections.ask(requests, add_progress)

    def compiled_bytes(self) -> dict[StageKey, dict[str, int]]:
        """Return the compilers' figures for temporary bytes of all stages' passes."""
        found: dict[StageKey, dict[str, int]] = {}
        for answer in self._all(schema.TellCompiledBytes()).values():
            for r, s, passes in answer.stages:
                found.setdefault((r, s), {}).update(passes)
        return found

    def initialise(self, seed: int) -> None:
        """Initialise weights and optimizer state, as a function of the seed alone."""
        self._all(schema.Initialise(seed=seed))

    def step(
        self,
        number: int,
        *,
        traced: bool = False,
        loss_scale: float | None = None,
        checks: StepChecks = NO_CHECKS,
    ) -> StepCommit:
        """Train on the global batch of this step; return once all workers know NORM.

        `loss_scale` is for plans with a float16 stage. Afterwards `spans` returns when
        the actions of traced steps ran, and `timing` has how long those of an earlier
        step took.
        """
        request = schema.Train(
            step=number,
            turn=self.next_turn(),
            traced=traced,
            timed=self.timing.is_wanted,
            loss_scale=loss_scale,
            checks=checks,
            expected_s=self._predicted_step_s(),
        )
        answers = self._all(request)
        self._is_first_step = False
        self.timing.record(answers)
        first, *others = (answer.commit for answer in answers.values())
        assert all(other == first for other in others), f"workers disagree on {number}"
        return first

    def _predicted_step_s(self) -> float | None:
        """Return the plan's prediction for its first step; None for later steps."""
        is_known = self.predicts_steps and self._is_first_step and self.plan.predicted
        return is_known.step_time_s if is_known else None

    def leave_out(self, number: int) -> StepCommit:
        """Commit this step without its batch: only step counters change."""
        left_out = StepCommit(squares=0.0, losses=(), num_tokens=1, is_left_out=True)
        self._all(schema.LeaveOut(step=number, commit=left_out))
        return left_out

    def check_state(self, digests: bool) -> tuple[bool, tuple[Disagreement, ...]]:
        """Return whether all weights are finite, and where those of holders differ."""
        answers = self._all(schema.CheckState(digests=digests))
        found = [stage for answer in answers.values() for stage in answer.stages]
        of_stages = {stage.stage: dict(stage.digests) for stage in found}
        return all(stage.is_finite for stage in found), disagreements(of_stages)

    def drop_state(self, storage: CheckpointStorage) -> None:
        """Make every worker discard its state in memory, even one outside the plan.

        Workers also delete saves after `saved`, from which a later start would resume.
        """
        kept = -1 if self.saved is None else self.saved
        request = schema.DropState(kept=kept, storage=storage)
        self.connections.ask(dict.fromkeys(self.connections.workers, request))
        self.is_not_finite, self._saving = False, (0, [])

    def spans(self) -> list[Span]:
        """Return when all traced actions ran, by the controller's clock."""
        return [span for worker in self.workers for span in self._spans(worker)]

    def _spans(self, worker: str) -> Iterator[Span]:
        """Yield the spans of a worker, which reads its clock half-way to the answer."""
        # the first request waits for pending work, so that the second does not
        self.connections.ask({worker: schema.TellTime()})
        asked_s = time.perf_counter()
        clock_s = self.connections.ask({worker: schema.TellTime()})[worker].now_s
        late_s = (asked_s + time.perf_counter()) / 2 - clock_s
        answer = self.connections.ask({worker: schema.TellSpans()})[worker]
        actions = parse_program(answer.actions)
        for action, (node, device, *times_s) in zip(actions, answer.spans, strict=True):
            start_s, end_s = times_s
            yield Span(node, device, action, start_s + late_s, end_s + late_s)

    def evaluate(self, batches: Sequence[int]) -> float:
        """Return the mean cross-entropy in nats per token over these batches."""
        sums, num_tokens = 0.0, 0
        for number in batches:
            answers = self._all(schema.Evaluate(batch=number, turn=self.next_turn()))
            sums += total_loss(loss for m in answers.values() for loss in m.losses)
            num_tokens += next(iter(answers.values())).num_tokens
        return sums / num_tokens

    def next_logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Return logits_V after the (last seq_len) tokens, by the first replica."""
        answers = self._all(schema.Predict(tokens=tokens, turn=self.next_turn()))
        (logits_V,) = [m.logits for m in answers.values() if m.logits is not None]
        return np.array(logits_V, np.float32)

    def save(
        self,
        storage: CheckpointStorage,
        step: int,
        host: Mapping[str, Any],
        best: Callable[[], int | None] = lambda: None,
    ) -> bool:
        """Start a checkpoint; return False if one is still being written somewhere.

        Workers write in parallel, each the state that it owns, with `host`. They keep
        the step that `best` returns, however old; the controller calls `best` once it
        knows which step all have saved. All workers upload the same steps to the store:
        the last, and those at which no worker is still uploading.
        """
        states = self._savers()
        if any(message.busy for message in states.values()):
            return False
        saving = [worker for worker, message in states.items() if message.saves]
        helping = [w for hosts in self._hosts() if len(hosts) > 1 for w in hosts]
        self._see_to_copies(storage)
        self.attempts[step] = self.new_attempts.new()
        request = schema.SaveState(
            storage=storage,
            step=step,
            host={**host, "attempt": self.attempts[step]},
            workers=[*map(file_name, saving)],
            safe=self.safe,
            best=best(),
            uploads_now=len(saving) == 1
            or not any(message.storing for message in states.values()),
            expected_s=self.moving_s(),
        )
        self._saving = step, saving
        self._expected_save_s = self.moving_s(storage.copies, storage.cloud is None)
        self.connections.ask(dict.fromkeys([*saving, *helping], request))
        return True

    def moving_s(self, times: int = 1, is_bounded: bool = True) -> float | None:
        """Return how long writing or sending the whole state `times` times may take.

        None if its size is unknown, or if not `is_bounded`: a store has no least rate.
        """
        found = sum(self.state_bytes.values())
        return times * moving_s(found) if found and is_bounded else None

    def _see_to_copies(self, storage: CheckpointStorage) -> None:
        """Tell workers who keeps copies for whom, once per epoch."""
        now = self.connections.epoch, storage.copies
        if storage.copies == 1 or self._copying == now or self.connections.only:
            return
        answers = self._all(schema.KeepCopies(storage=storage))
        found = copy_targets({w: node_of(w) for w in self.workers}, storage.copies)
        if len(next(iter(found.values()))) < storage.copies - 1:
            asked = f"{storage.copies} copies of each checkpoint are requested"
            warnings.warn(f"{asked}, but there are fewer nodes", stacklevel=2)
        orders = {}
        for worker, others in found.items():
            to = {file_name(other): answers[other].address for other in others}
            orders[worker] = schema.SendCopies(to=to)
        self.connections.ask(orders)
        self._copying = now

    def wait_saved(self) -> None:
        """Return once no checkpoint is being written."""
        self._all(schema.AwaitSaved(expected_s=self._expected_save_s))
        self._savers()

    def _savers(self) -> dict[str, schema.SavingState]:
        """Query how saving proceeds; record which step all have saved."""
        states = self._all(schema.TellSaving())
        step, workers = self._saving
        save = step, self.attempts.get(step)
        if workers and all(w in states and states[w].newest == save for w in workers):
            self.saved, self.safe = step, (step, self.attempts[step])
            self.is_kept = True
        there = [states[w] for w in workers if w in states]
        self.is_not_finite = any(state.not_finite == save for state in there)
        return states

    def end(self) -> None:
        """Let the workers finish their writes, and leave.

        The first host of a node leaves last: the others depend on it.
        """
        first = [hosts[0] for hosts in self._hosts()]
        self.wait_saved()
        others = [worker for worker in self.workers if worker not in first]
        request = schema.Leave(expected_s=self._expected_save_s)
        for leaving in filter(None, (others, first)):
            self.connections.ask(dict.fromkeys(leaving, request))

    def dismiss(self, leaving: Sequence[str]) -> None:
        """Let these workers leave, whose state the others have by now.

        Raises WorkerLost if another has gone: their state may then be needed again.
        """
        there = self.connections.workers
        for worker in self.workers:
            if worker not in there:
                raise WorkerLost(worker, "left")
        self.connections.ask(dict.fromkeys(leaving, schema.Leave()))

    def _check_one_host_each(self) -> None:
        for hosts in self._hosts():
            if len(hosts) > 1:
                raise BadInput(
                    got=f"--transport transfer, but node {node_of(hosts[0])!r} has "
                    f"hosts = {len(hosts)}",
                    allowed="one host per node with --transport transfer",
                    fix="use --transport sockets",
                )

    def next_turn(self) -> int:
        """Return a number for one joint activity, to keep its messages apart."""
        self._turn += 1
        return self._turn

    def _all(self, request: Request[Answer]) -> dict[str, Answer]:
        return self.connections.ask(dict.fromkeys(self.workers, request))
