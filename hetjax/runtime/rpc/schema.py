# SPDX-License-Identifier: Apache-2.0
"""The messages between a controller and its workers.

Owns a class for each request, each answer, and for what a worker tells unasked. Does
not own what all have (`message.py`), how they travel (`worker_connections.py`), who
sends which when (`runtime/control/`), nor what a worker does then (`runtime/worker/`).

`epoch` counts how often the controller has connected its workers to each other. A
request is of the epoch in which it is asked, an answer of that of its request.
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
    """The answer where there is nothing else to say."""


class Address(Message):
    """Where the worker listens, host:port."""

    address: str


class Trained(Message):
    commit: StepCommit
    times: WorkerTimes | None = None  # of a step before it


class Reached(Message):
    """`at` steps are behind the state, None: it has none; the commit of the last."""

    at: int | None
    commit: StepCommit | None
    is_broken_off: bool  # the next one was


class CheckedState(Message):
    """Of the stages that the worker leads."""

    stages: Sequence[StageNumbers]


class HeldState(Message):
    at: int | None
    leaves: Sequence[str]  # that are kept of the state after so many steps


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundSave:
    """What a disk has of a save: workers that are `absent` took part, and have no part
    there; `run` is whose save it is."""

    save: Save
    leaves: Sequence[str]
    host: Json
    absent: Sequence[str] = ()
    run: str = ""
    is_trusted: bool = True  # it is signed with the run's key, if there is one


class FoundSaves(Message):
    saves: Sequence[FoundSave]
    place: str = ""  # its folder, where the run's directory cannot be seen


class NeededState(Message):
    """The leaves that the worker's stages are made of, with their bytes."""

    at: int | None
    leaves: Mapping[str, int]


class Collected(Message):
    """What did not come; what did by tier, and until when."""

    missing: Sequence[str]
    num_bytes: Mapping[str, int]
    seconds: Mapping[str, float]


class ClockTime(Message):
    now_s: float


class Ahead(Message):
    is_done: bool  # all that was to be compiled ahead, or it cannot be


class CompiledBytes(Message):
    stages: Sequence[tuple[int, int, Mapping[str, int]]]  # replica, stage, by pass


class TracedActions(Message):
    """Actions as text, a line each, and (node, device, start_s, end_s) of each."""

    actions: str
    spans: Sequence[tuple[str, int, float, float]]


class Evaluated(Message):
    """Summed losses by last stage, of those that the worker leads."""

    losses: Sequence[StageLoss]
    num_tokens: int


class NextLogits(Message):
    """logits_V, of the one worker that has them."""

    logits: Sequence[float] | None


class SavingState(Message):
    """Whether it saves anything, is about to, or copies a save to the store. `newest`
    is done; `not_finite` was not written, for its weights are not."""

    saves: bool
    busy: bool = False
    storing: bool = False
    newest: Save | None = None
    not_finite: Save | None = None


class Lost(Message):
    """The request was broken off, as this worker is lost."""

    worker: str
    reason: str


class RequestRefused(Message):
    """The request asks for what the user has to put right: a BadInput."""

    got: str
    allowed: str
    fix: str


class RequestFailed(Message):
    error: str


# --- what nobody asked


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
    """Make stages and data from settings; `world` is entered first.

    If so asked, what `Compile` waits for is begun at once, beside what comes next.
    """

    settings: Json
    world: World | None = None
    compiles: bool = False


class CompileAhead(Request[Done], minutes=5, what="begin to compile in the background"):
    """Compile in the background what other settings would ask for."""

    settings: Json


class TellAhead(Request[Ahead], minutes=5, what="tell what it compiles ahead"):
    """Tell how compiling in the background goes."""


class Listen(Request[Address], minutes=5, what="listen for its peers"):
    """Listen for peers of another epoch."""


class Join(Request[Done], minutes=10, what="connect to its peers"):
    """Connect to the peers at these addresses, as this epoch's."""

    addresses: Mapping[str, str]
    transport: TransportName


class Compile(Request[Done], minutes=120, what="compile its stages"):
    """Compile the programs of all stages; `Compiling` tells how far that is."""


class TellCompiled(Request[CompiledBytes], minutes=10, what="tell of its programs"):
    """Tell what the compiled passes need while they run."""


class Initialise(Request[Done], minutes=60, what="make its first weights"):
    """Make fresh weights and optimizer state."""

    seed: int


class Train(Request[Trained], minutes=30, what="train a step"):
    """Train on the batch of a step; no two turns share their messages to peers.

    `loss_scale` is there where a stage of the plan computes in float16.
    """

    step: int
    turn: int
    traced: bool
    timed: bool = False  # which the answer to a later one tells
    loss_scale: float | None = None
    checks: StepChecks = NO_CHECKS


class LeaveOut(Request[Done], minutes=30, what="leave a step out"):
    """Commit the step of this number without a look at its batch."""

    step: int
    commit: StepCommit


class CheckState(Request[CheckedState], minutes=30, what="check its weights"):
    """Tell whether the weights are finite, and digests of them if so asked."""

    digests: bool


class DropState(Request[Done], minutes=10, what="drop its state"):
    """Have no state any more, nor saves after `kept` steps: neither is believed."""

    kept: int
    storage: CheckpointStorage


class Reroute(Request[Done], minutes=10, what="take over samples of others"):
    """Go on with other numbers of microbatches by replica; one of none is idle.

    The state stays as it is, and what a broken step has come to is dropped. Peers are
    left: `Join` others.
    """

    num_microbatches: Sequence[int]


class TellReached(Request[Reached], minutes=10, what="tell which step it has reached"):
    """Tell how far the state is."""


class FinishStep(Request[Done], minutes=30, what="finish a step"):
    """Commit the step that was broken off, as others have."""

    commit: StepCommit


class HoldState(Request[HeldState], minutes=30, what="tell what it has in memory"):
    """Keep the state where it is until `PlaceState`."""


class FindSaves(Request[FoundSaves], minutes=60, what="tell what it has on disk"):
    """Look what the disk has."""

    storage: CheckpointStorage


class TellNeeds(Request[NeededState], minutes=10, what="tell what it needs"):
    """Tell what the state is made of."""


class CollectLeaves(
    Request[Collected], minutes=120, what="get the state that it lacks"
):
    """Give and take leaves of one save, as one round of a recovery.

    `own` are leaves by tier that the worker has itself, `give` are (to whom, tier,
    leaves), `take` are (from whom, leaves). `numbers` are the same for all workers.
    """

    save: Save
    turn: int
    own: Mapping[Tier, Sequence[str]]
    give: Sequence[tuple[str, Tier, Sequence[str]]]
    take: Sequence[tuple[str, Sequence[str]]]
    numbers: Mapping[str, int]
    storage: CheckpointStorage


class PlaceState(Request[Done], minutes=60, what="put the state on its devices"):
    """Put what was collected on the devices: the state after `step`."""

    step: int


class TellTime(Request[ClockTime], minutes=30, what="tell the time of its clock"):
    """Read the clock of `TellSpans`."""


class TellSpans(Request[TracedActions], minutes=10, what="tell when its actions ran"):
    """Tell when the actions of all traced steps ran."""


class Evaluate(Request[Evaluated], minutes=30, what="evaluate a batch"):
    """Run a validation batch, no update."""

    batch: int
    turn: int


class Predict(Request[NextLogits], minutes=30, what="predict a token"):
    """Tell the logits of what follows the tokens."""

    tokens: Sequence[int]
    turn: int


class TellSaving(Request[SavingState], minutes=10, what="tell what it has saved"):
    """Tell how saving goes."""


class KeepCopies(Request[Address], minutes=10, what="be ready to keep copies"):
    """Be ready to keep copies of what others save."""

    storage: CheckpointStorage


class SendCopies(Request[Done], minutes=10, what="connect to who keeps its copies"):
    """Send copies of what is saved to those at these addresses, by file name."""

    to: Mapping[str, str]


class SaveState(Request[Done], minutes=30, what="begin a checkpoint"):
    """Start a checkpoint of `step`, if this worker is among `workers` (file names).

    `host` goes into its manifest. Save `safe` and step `best` stay; what is not
    `is_stored` is not copied to the store for now.
    """

    storage: CheckpointStorage
    step: int
    host: Json
    workers: Sequence[str]
    safe: Save | None
    best: int | None
    is_stored: bool


class AwaitSaved(Request[Done], minutes=120, what="finish a checkpoint"):
    """Answer once no save is being written."""


class Leave(Request[Done], minutes=120, what="finish what it writes, and leave"):
    """Finish what is being written, and end."""


class BreakOff(
    Request[Done], minutes=2, what="leave a step that another worker has broken"
):
    """Wait no longer for this worker, which is lost; nobody answers this.

    One that `is_late` has itself taken too long, and writes to its log where it is.
    """

    worker: str
    reason: str
    is_late: bool = False
