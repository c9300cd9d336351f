# SPDX-License-Identifier: Apache-2.0
"""How long a controller waits for its workers before it takes them for lost.

Owns the table: for each request the longest time and what it is waited for. The limits
are generous, as they only have to end what would never end: a worker that is gone, or
stopped, is told of by other means (`hetjax/comm/heart.py`). `--patience` multiplies all
of them. Does not own the waiting (`worker_connections.py`).
"""

from dataclasses import dataclass
from typing import Any

from hetjax.runtime.messages import (
    AwaitSaved,
    BreakOff,
    Build,
    CollectLeaves,
    Compile,
    CompileAhead,
    Coordinate,
    Evaluate,
    FindSaves,
    FinishStep,
    HoldState,
    Initialise,
    Join,
    KeepCopies,
    Leave,
    Listen,
    PlaceState,
    Predict,
    Request,
    SaveState,
    SendCopies,
    TellNeeds,
    TellReached,
    TellSaving,
    TellSpans,
    TellTime,
    Train,
)

_MINUTE_S, _HOUR_S = 60.0, 3600.0
START = "start"  # of a worker, which nobody can ask for it


@dataclass(frozen=True, slots=True)
class Limit:
    seconds: float
    what: str

    def passed(self, patience: float) -> str:
        """Why a worker that took longer counts as lost."""
        return (
            f"took more than {patience * self.seconds:g} s to {self.what} "
            "(--patience multiplies all such limits)"
        )


LIMITS: dict[type[Request[Any]] | str, Limit] = {
    START: Limit(10 * _MINUTE_S, "start and call its controller"),
    BreakOff: Limit(2 * _MINUTE_S, "leave a step that another worker has broken"),
    Coordinate: Limit(5 * _MINUTE_S, "choose a port for the hosts of its node"),
    Build: Limit(_HOUR_S, "make its stages and open the data"),
    CompileAhead: Limit(5 * _MINUTE_S, "begin to compile in the background"),
    Listen: Limit(5 * _MINUTE_S, "listen for its peers"),
    Join: Limit(10 * _MINUTE_S, "connect to its peers"),
    Compile: Limit(2 * _HOUR_S, "compile its stages"),
    Initialise: Limit(_HOUR_S, "make its first weights"),
    Train: Limit(30 * _MINUTE_S, "train a step"),
    TellReached: Limit(10 * _MINUTE_S, "tell which step it has reached"),
    FinishStep: Limit(30 * _MINUTE_S, "finish a step"),
    HoldState: Limit(30 * _MINUTE_S, "tell what it has in memory"),
    FindSaves: Limit(_HOUR_S, "tell what it has on disk"),
    TellNeeds: Limit(10 * _MINUTE_S, "tell what it needs"),
    CollectLeaves: Limit(2 * _HOUR_S, "get the state that it lacks"),
    PlaceState: Limit(_HOUR_S, "put the state on its devices"),
    TellTime: Limit(30 * _MINUTE_S, "tell the time of its clock"),
    TellSpans: Limit(10 * _MINUTE_S, "tell when its actions ran"),
    Evaluate: Limit(30 * _MINUTE_S, "evaluate a batch"),
    Predict: Limit(30 * _MINUTE_S, "predict a token"),
    TellSaving: Limit(10 * _MINUTE_S, "tell what it has saved"),
    KeepCopies: Limit(10 * _MINUTE_S, "be ready to keep copies"),
    SendCopies: Limit(10 * _MINUTE_S, "connect to those that keep its copies"),
    SaveState: Limit(30 * _MINUTE_S, "begin a checkpoint"),
    AwaitSaved: Limit(2 * _HOUR_S, "finish a checkpoint"),
    Leave: Limit(2 * _HOUR_S, "finish what it writes, and leave"),
}
