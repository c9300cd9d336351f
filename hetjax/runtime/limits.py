# SPDX-License-Identifier: Apache-2.0
"""How long a controller waits for its workers before it takes them for lost.

Owns the table: for each request the longest time and what it is waited for. The limits
are generous, as they only have to end what would never end: a worker that is gone, or
stopped, is told of by other means (`hetjax/comm/heart.py`). `--patience` multiplies all
of them. Does not own the waiting (`worker_connections.py`).
"""

from dataclasses import dataclass
from typing import Any

from hetjax.runtime import messages
from hetjax.runtime.messages import Request

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
    messages.BreakOff: Limit(
        2 * _MINUTE_S, "leave a step that another worker has broken"
    ),
    messages.Coordinate: Limit(
        5 * _MINUTE_S, "choose a port for the hosts of its node"
    ),
    messages.Build: Limit(_HOUR_S, "make its stages and open the data"),
    messages.CompileAhead: Limit(5 * _MINUTE_S, "begin to compile in the background"),
    messages.Listen: Limit(5 * _MINUTE_S, "listen for its peers"),
    messages.Join: Limit(10 * _MINUTE_S, "connect to its peers"),
    messages.Compile: Limit(2 * _HOUR_S, "compile its stages"),
    messages.Initialise: Limit(_HOUR_S, "make its first weights"),
    messages.Train: Limit(30 * _MINUTE_S, "train a step"),
    messages.TellReached: Limit(10 * _MINUTE_S, "tell which step it has reached"),
    messages.FinishStep: Limit(30 * _MINUTE_S, "finish a step"),
    messages.HoldState: Limit(30 * _MINUTE_S, "tell what it has in memory"),
    messages.FindSaves: Limit(_HOUR_S, "tell what it has on disk"),
    messages.TellNeeds: Limit(10 * _MINUTE_S, "tell what it needs"),
    messages.CollectLeaves: Limit(2 * _HOUR_S, "get the state that it lacks"),
    messages.PlaceState: Limit(_HOUR_S, "put the state on its devices"),
    messages.TellTime: Limit(30 * _MINUTE_S, "tell the time of its clock"),
    messages.TellSpans: Limit(10 * _MINUTE_S, "tell when its actions ran"),
    messages.Evaluate: Limit(30 * _MINUTE_S, "evaluate a batch"),
    messages.Predict: Limit(30 * _MINUTE_S, "predict a token"),
    messages.TellSaving: Limit(10 * _MINUTE_S, "tell what it has saved"),
    messages.KeepCopies: Limit(10 * _MINUTE_S, "be ready to keep copies"),
    messages.SendCopies: Limit(10 * _MINUTE_S, "connect to those that keep its copies"),
    messages.SaveState: Limit(30 * _MINUTE_S, "begin a checkpoint"),
    messages.AwaitSaved: Limit(2 * _HOUR_S, "finish a checkpoint"),
    messages.Leave: Limit(2 * _HOUR_S, "finish what it writes, and leave"),
}
