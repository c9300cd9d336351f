# SPDX-License-Identifier: Apache-2.0
"""How long a controller waits for its workers before it takes them for lost.

Owns the table: for each request the longest time and what it is waited for. The limits
are generous, as they only have to end what would never end: a worker that is gone, or
stopped, is told of by other means (`hetjax/comm/heart.py`). `--patience` multiplies all
of them. Does not own the waiting (`worker_connections.py`).
"""

from dataclasses import dataclass
from typing import Any

from hetjax.runtime.rpc import schema
from hetjax.runtime.rpc.schema import Request

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
    schema.BreakOff: Limit(
        2 * _MINUTE_S, "leave a step that another worker has broken"
    ),
    schema.Coordinate: Limit(5 * _MINUTE_S, "choose a port for the hosts of its node"),
    schema.Build: Limit(_HOUR_S, "make its stages and open the data"),
    schema.CompileAhead: Limit(5 * _MINUTE_S, "begin to compile in the background"),
    schema.Listen: Limit(5 * _MINUTE_S, "listen for its peers"),
    schema.Join: Limit(10 * _MINUTE_S, "connect to its peers"),
    schema.Compile: Limit(2 * _HOUR_S, "compile its stages"),
    schema.Initialise: Limit(_HOUR_S, "make its first weights"),
    schema.Train: Limit(30 * _MINUTE_S, "train a step"),
    schema.TellReached: Limit(10 * _MINUTE_S, "tell which step it has reached"),
    schema.FinishStep: Limit(30 * _MINUTE_S, "finish a step"),
    schema.HoldState: Limit(30 * _MINUTE_S, "tell what it has in memory"),
    schema.FindSaves: Limit(_HOUR_S, "tell what it has on disk"),
    schema.TellNeeds: Limit(10 * _MINUTE_S, "tell what it needs"),
    schema.CollectLeaves: Limit(2 * _HOUR_S, "get the state that it lacks"),
    schema.PlaceState: Limit(_HOUR_S, "put the state on its devices"),
    schema.TellTime: Limit(30 * _MINUTE_S, "tell the time of its clock"),
    schema.TellSpans: Limit(10 * _MINUTE_S, "tell when its actions ran"),
    schema.Evaluate: Limit(30 * _MINUTE_S, "evaluate a batch"),
    schema.Predict: Limit(30 * _MINUTE_S, "predict a token"),
    schema.TellSaving: Limit(10 * _MINUTE_S, "tell what it has saved"),
    schema.KeepCopies: Limit(10 * _MINUTE_S, "be ready to keep copies"),
    schema.SendCopies: Limit(10 * _MINUTE_S, "connect to those that keep its copies"),
    schema.SaveState: Limit(30 * _MINUTE_S, "begin a checkpoint"),
    schema.AwaitSaved: Limit(2 * _HOUR_S, "finish a checkpoint"),
    schema.Leave: Limit(2 * _HOUR_S, "finish what it writes, and leave"),
}
