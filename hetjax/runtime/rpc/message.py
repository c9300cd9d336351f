# SPDX-License-Identifier: Apache-2.0
"""Defines the parts that all messages share, and how long a request may take.

Owns the base classes of the messages (`schema.py`), and the table of limits.

`epoch` counts how often the controller has connected its workers to each other. A
request has the epoch in which it is sent, an answer that of its request.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar, dataclass_transform, get_args


@dataclass(frozen=True, slots=True)
class Limit:
    """How long a controller waits for a worker to do `what`.

    Generous: it only ends waits that would never end. A worker that is gone or stopped
    is reported by other means (`hetjax/comm/heart.py`).
    """

    seconds: float
    what: str

    def passed(self, limit_s: float) -> str:
        """Return why a worker that took longer counts as lost."""
        return (
            f"took more than {limit_s:g} s to {self.what} "
            "(--timeout-scale multiplies all such limits)"
        )


START = "start"  # of a worker, for which there is no request
LIMITS: dict[type["Request[Any]"] | str, Limit] = {
    START: Limit(600.0, "start and connect to its controller")
}


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Message:
    """The base of all messages; every subclass is a frozen dataclass."""

    epoch: int = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True, kw_only=True)(cls)


A = TypeVar("A", bound=Message)


class Request(Message, Generic[A]):
    """A request to a worker, which answers with an `A`, or reports trouble.

    The worker may take `minutes` to do `what` before it counts as lost; less, if the
    caller gives the expected time or earlier requests show it (`limits.py`).
    """

    expected_s: float | None = None

    def __init_subclass__(cls, *, minutes: float, what: str) -> None:
        super().__init_subclass__()
        LIMITS[cls] = Limit(60 * minutes, what)


AnyRequest = Request[Any]


def answer_of(request: type[Request[A]]) -> type[A]:
    """Return the class of the answer to requests of this class."""
    (base,) = request.__orig_bases__  # pyright: ignore[reportAttributeAccessIssue]
    return get_args(base)[0]
