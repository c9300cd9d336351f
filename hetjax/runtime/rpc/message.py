# SPDX-License-Identifier: Apache-2.0
"""What every message has, and how long a request may take.

Owns the classes that the messages (`schema.py`) are made of, and the table of limits.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar, dataclass_transform, get_args


@dataclass(frozen=True, slots=True)
class Limit:
    """How long a controller waits for a worker to do `what`.

    Generous, as it only has to end what would never end: a worker that is gone, or
    stopped, is reported by other means (`hetjax/comm/heart.py`).
    """

    seconds: float
    what: str

    def passed(self, limit_s: float) -> str:
        """Why a worker that took longer counts as lost."""
        return (
            f"took more than {limit_s:g} s to {self.what} "
            "(--timeout-scale multiplies all such limits)"
        )


START = "start"  # of a worker, which nobody can ask for it
LIMITS: dict[type["Request[Any]"] | str, Limit] = {
    START: Limit(600.0, "start and call its controller")
}


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Message:
    """What one side tells the other; every class of messages is a frozen dataclass."""

    epoch: int = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True, kw_only=True)(cls)


A = TypeVar("A", bound=Message)


class Request(Message, Generic[A]):
    """What a worker is asked; it answers with an `A`, or tells of trouble.

    It may take so many `minutes` to do `what`, before it counts as lost; less, where
    the caller says, or it is known, how long that should take (`limits.py`).
    """

    expected_s: float | None = None

    def __init_subclass__(cls, *, minutes: float, what: str) -> None:
        super().__init_subclass__()
        LIMITS[cls] = Limit(60 * minutes, what)


AnyRequest = Request[Any]


def answer_of(request: type[Request[A]]) -> type[A]:
    """The class of what answers a request of this class."""
    (base,) = request.__orig_bases__  # pyright: ignore[reportAttributeAccessIssue]
    return get_args(base)[0]
