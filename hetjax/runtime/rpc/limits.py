# SPDX-License-Identifier: Apache-2.0
"""How long a controller waits for what it asks of a worker.

Owns what is said of a worker that has passed a limit. Does not own which limit a
request has (`schema.py`), nor waiting (`worker_connections.py`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limit:
    """How long a controller waits for a worker to do `what`.

    Generous, as it only has to end what would never end: a worker that is gone, or
    stopped, is told of by other means (`hetjax/comm/heart.py`).
    """

    seconds: float
    what: str

    def passed(self, patience: float) -> str:
        """Why a worker that took longer counts as lost."""
        return (
            f"took more than {patience * self.seconds:g} s to {self.what} "
            "(--patience multiplies all such limits)"
        )
