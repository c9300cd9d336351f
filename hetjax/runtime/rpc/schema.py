# SPDX-License-Identifier: Apache-2.0
"""Defines the messages between a controller and its workers.

Owns a class for each request, answer, and unsolicited report of a worker. Does not own
what all messages share (`message.py`), their transport (`worker_connections.py`), who
sends which when (`runtime/control/`), nor reactions to them (`runtime/worker/`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hetjax.checkpoint.recovery_plan import Save, Tier
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.mesh.multihost import World
from hetjax.runtime.execution.checking.checks import NO_CHECKS, StageNumbers, StepChecks
from hetjax.runtime.execution.commit import StageLoss, StepCommit
from hetjax.runtime.execution.step_clock import WorkerTimes
from hetjax.runtime.rpc.message import Message, Request

Json = Mapping[str, Any]
TransportName = Literal["sockets", "transfer"]


# --- answers


class Done(Message):
    """The answer if there is nothing else to report."""


class Address(Message):
    """The address at which the worker listens, host:port."""

    address: str


class Trained(Message):
    commit: StepCommit
    times: WorkerTimes | None = None  # of an earlier step


class Reached(Message):
    """How many steps the state was trained for (None: no state); the last commit."""

    at: int | None
    commit: StepCommit | None
    is_aborted: bool  # whether the next step was aborted


class CheckedState(Message):
    """The findings on the stages that the worker leads."""

    stages: Sequence[StageNumbers]


class HeldState(Message):
    at: int | None
    leaves: Sequence[str]  # held of the state after `at` steps


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundSave:
    """The part of a save that a disk has; `run` is the run that saved it. Workers that
    are `absent` took part in the save, but have no part there."""

    save: Save
    leaves: Sequence[str]
    host: Json
    absent: Sequence[str] = ()
    run: str = ""
    is_trusted: bool = True  # signed with the run's key, if there is one


class FoundSaves(Message):
    saves: Sequence[FoundSave]
    place: str = ""  # its folder, if it does not see the run's directory


class NeededState(Message):
    """The leaves of the worker's stages, with their bytes."""

    at: int | None
    leaves: Mapping[str, int]


class Collected(Message):
    """The leaves that did not arrive; the bytes received and seconds taken by tier."""

    missing: Sequence[str]
    num_bytes: Mapping[str, int]
    seconds: Mapping[str, float]


class ClockTime(Message):
    now_s: float


class CompilingAhead(Message):
    is_done: bool  # all is compiled ahead, or cannot be


class CompiledBytes(Message):
    stages: Sequence[tuple[int, int, Mapping[str, int]]]  # replica, stage, by pass


class TracedActions(Message):
    """Actions as text, a line each, and (node, device, start_s, end_s) of each."""

    actions: str
    spans: Sequence[tuple[str, int, float, float]]


class Evaluated(Message):
    """Summed losses by last stage, for those that the worker leads."""

    losses: Sequence[StageLoss]
    num_tokens: int


class NextLogits(Message):
    """logits_V, from the one worker that has them."""

    logits: Sequence[float] | None


class SavingState(Message):
    """`saves`: the worker takes part in saves; `busy`: it is writing one; `storing`: it
    is uploading one. `newest` is its newest complete save. `not_finite` is its last
    save, if that was not written because its weights are not finite."""

    saves: bool
    busy: bool = False
    storing: bool = False
    newest: Save | None = None
    not_finite: Save | None = None


class Lost(Message):
    """The request was aborted, as this worker is lost."""

    worker: str
    reason: str


class RequestRefused(Message):
    """The request needs a correction by the user: a BadInput."""

    got: str
    allowed: str
    fix: str


class RequestFailed(Message):
    error: str


# --- unsolicited reports


class Compiling(Message):
    """How many of all programs are compiled."""

    num_done: int
    num_all: int


class Warned(Message):
    text: str


class Noticed(Message):
    """The worker's machine is about to be taken away."""

    source: str
    grace_s: float


# --- requests


class Coordinate(
    Request[Address], minutes=5, what="choose a port for the hosts of its node"
):
    """Choose where to serve the world of a node with several hosts."""


class Build(Request[Done], minutes=60, what="make its stages and open the data"):
    """Build stages and data from settings; enter `world` first.

    With `compiles`, start at once what `Compile` waits for, beside what follows.
    """

    settings: Json
    world: World | None = None
    compiles: bool = False


class CompileAhead(Request[Done], minutes=5, what="start to compile in the background"):
    """Compile in the background what other settings would require."""

    settings: Json


class TellCompilingAhead(
    Request[CompilingAhead], minutes=5, what="report what it compiles ahead"
):
    """Report how compiling in the background proceeds."""


class Listen(Request[Address], minutes=5, what="listen for its peers"):
    """Listen for peers of another epoch."""


class Join(Request[Done], minutes=10, what="connect to its peers"):
    """Connect to the peers at these addresses, as this epoch's."""

    addresses: Mapping[str, str]
    transport: TransportName


class Compile(Request[Done], minutes=120, what="compile its stages"):
    """Compile the programs of all stages; `Compiling` reports progress."""


class TellCompiledBytes(
    Request[CompiledBytes], minutes=10, what="report on its programs"
):
    """Report the bytes that the compiled passes need while they run."""


class Initialise(Request[Done], minutes=60, what="make its initial weights"):
    """Make fresh weights and optimizer state."""

    seed: int


class Train(Request[Trained], minutes=30, what="train a step"):
    """Train on the batch of a step; no two turns share their messages to peers."""

    step: int
    turn: int
    traced: bool
    timed: bool = False  # a later answer reports it
    loss_scale: float | None = None  # set if a stage computes in float16
    checks: StepChecks = NO_CHECKS


class LeaveOut(Request[Done], minutes=30, what="leave a step out"):
    """Commit the step of this number without reading its batch."""

    step: int
    commit: StepCommit


class CheckState(Request[CheckedState], minutes=30, what="check its weights"):
    """Report whether the weights are finite, and with `digests` their digests."""

    digests: bool


class DropState(Request[Done], minutes=10, what="drop its state"):
    """Discard the state, and saves after `kept` steps: neither is trusted."""

    kept: int
    storage: CheckpointStorage


class Reroute(Request[Done], minutes=10, what="take over samples of others"):
    """Continue with other microbatch counts by replica; a replica with none is idle.

    The state stays as it is, and the results of an aborted step are discarded. Peers
    are left: `Join` others.
    """

    num_microbatches: Sequence[int]


class TellReached(Request[Reached], minutes=10, what="report the step it has reached"):
    """Report how far the state is."""


class FinishStep(Request[Done], minutes=30, what="finish a step"):
    """Commit the aborted step, as others have."""

    commit: StepCommit


class HoldState(Request[HeldState], minutes=30, what="report what it has in memory"):
    """Keep the state where it is until `PlaceState`."""


class FindSaves(Request[FoundSaves], minutes=60, what="report what it has on disk"):
    """Report what the disk has."""

    storage: CheckpointStorage


class TellNeeds(Request[NeededState], minutes=10, what="report what it needs"):
    """Report the leaves of the state."""


class CollectLeaves(
    Request[Collected], minutes=120, what="get the state that it lacks"
):
    """Give and take leaves of one save, as one round of a recovery.

    `own` are leaves by tier that the worker loads itself, `give` are (receiver, tier,
    leaves), `take` are (sender, leaves). `numbers` are the same for all workers.
    """

    save: Save
    turn: int
    own: Mapping[Tier, Sequence[str]]
    give: Sequence[tuple[str, Tier, Sequence[str]]]
    take: Sequence[tuple[str, Sequence[str]]]
    numbers: Mapping[str, int]
    storage: CheckpointStorage


class PlaceState(Request[Done], minutes=60, what="put the state on its devices"):
    """Put the collected leaves on the devices: the state after `step`."""

    step: int


class TellTime(Request[ClockTime], minutes=30, what="report the time of its clock"):
    """Read the clock of `TellSpans`."""


class TellSpans(Request[TracedActions], minutes=10, what="report when its actions ran"):
    """Report when the actions of all traced steps ran."""


class Evaluate(Request[Evaluated], minutes=30, what="evaluate a batch"):
    """Evaluate a validation batch, without an update."""

    batch: int
    turn: int


class Predict(Request[NextLogits], minutes=30, what="predict a token"):
    """Report the logits of what follows the tokens."""

    tokens: Sequence[int]
    turn: int


class TellSaving(Request[SavingState], minutes=10, what="report what it has saved"):
    """Report how saving proceeds."""


class KeepCopies(Request[Address], minutes=10, what="be ready to keep copies"):
    """Prepare to keep copies of what others save."""

    storage: CheckpointStorage


class SendCopies(
    Request[Done], minutes=10, what="connect to the workers that keep its copies"
):
    """Send copies of saves to the workers at these addresses, by file name."""

    to: Mapping[str, str]


class SaveState(Request[Done], minutes=30, what="start a checkpoint"):
    """Start a checkpoint of `step`, if this worker is among `workers` (file names).

    `host` goes into its manifest. The worker keeps save `safe` and step `best`, and
    uploads the checkpoint at once only if it `uploads_now`.
    """

    storage: CheckpointStorage
    step: int
    host: Json
    workers: Sequence[str]
    safe: Save | None
    best: int | None
    uploads_now: bool


class AwaitSaved(Request[Done], minutes=120, what="finish a checkpoint"):
    """Answer once no save is being written."""


class Leave(Request[Done], minutes=120, what="finish its writes and leave"):
    """Finish pending writes, and end."""


class Abort(Request[Done], minutes=2, what="abort after another worker was lost"):
    """Stop waiting for this worker, which is lost; there is no answer to this.

    If `is_late`, the recipient has taken too long, and logs where it is.
    """

    worker: str
    reason: str
    is_late: bool = False
