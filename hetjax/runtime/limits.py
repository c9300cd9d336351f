# SPDX-License-Identifier: Apache-2.0
"""How long a controller waits for its workers before it takes them for lost.

Owns the table: for each request the longest time and what it is waited for. The limits
are generous, as they only have to end what would never end: a worker that is gone, or
stopped, is told of by other means (`hetjax/comm/heart.py`). `--patience` multiplies all
of them. Does not own the waiting (`control.py`).
"""

from dataclasses import dataclass

_MINUTE_S, _HOUR_S = 60.0, 3600.0
START, BREAK_OFF = "start", "break off"


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


LIMITS = {
    START: Limit(10 * _MINUTE_S, "start and call its controller"),
    BREAK_OFF: Limit(2 * _MINUTE_S, "leave a step that another worker has broken"),
    "coordinate": Limit(5 * _MINUTE_S, "choose a port for the hosts of its node"),
    "build": Limit(_HOUR_S, "make its stages and open the data"),
    "warm": Limit(5 * _MINUTE_S, "begin to compile in the background"),
    "listen": Limit(5 * _MINUTE_S, "listen for its peers"),
    "join": Limit(10 * _MINUTE_S, "connect to its peers"),
    "compile": Limit(2 * _HOUR_S, "compile its stages"),
    "initialise": Limit(_HOUR_S, "make its first weights"),
    "step": Limit(30 * _MINUTE_S, "train a step"),
    "outcome": Limit(10 * _MINUTE_S, "tell which step it has reached"),
    "finish": Limit(30 * _MINUTE_S, "finish a step"),
    "hold": Limit(30 * _MINUTE_S, "tell what it has in memory"),
    "look": Limit(_HOUR_S, "tell what it has on disk"),
    "needs": Limit(10 * _MINUTE_S, "tell what it needs"),
    "collect": Limit(2 * _HOUR_S, "get the state that it lacks"),
    "place": Limit(_HOUR_S, "put the state on its devices"),
    "clock": Limit(30 * _MINUTE_S, "tell the time of its clock"),
    "spans": Limit(10 * _MINUTE_S, "tell when its actions ran"),
    "evaluate": Limit(30 * _MINUTE_S, "evaluate a batch"),
    "logits": Limit(30 * _MINUTE_S, "predict a token"),
    "saver": Limit(10 * _MINUTE_S, "tell what it has saved"),
    "keep copies": Limit(10 * _MINUTE_S, "be ready to keep copies"),
    "send copies": Limit(10 * _MINUTE_S, "connect to those that keep its copies"),
    "save": Limit(30 * _MINUTE_S, "begin a checkpoint"),
    "saved": Limit(2 * _HOUR_S, "finish a checkpoint"),
    "end": Limit(2 * _HOUR_S, "finish what it writes, and leave"),
}
