# SPDX-License-Identifier: Apache-2.0
"""What a simulated worker does wrong next, though its process lives.

Owns these faults of a worker, and the answers that come of them. Does not own when they
are drawn (`faults.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from hetjax.runtime.execution.checking.checks import StageNumbers
from hetjax.runtime.rpc import schema
from hetjax.runtime.rpc.message import AnyRequest
from hetjax.runtime.rpc.schema import Message

# Of another kind or epoch than was asked for, or the one before once more
Mumble = Literal["kind", "epoch", "again"]


@dataclass
class Mishaps:
    """Faults to come; `has_mumbled` once an answer was one that must not be believed.

    One that `is_stuck` gives signs of life, and does nothing. `fails_at` is the kind of
    request that it comes upon an error in.
    """

    is_stuck: bool = False
    fails_at: type | None = None
    mumbles: Mumble | None = None
    has_mumbled: bool = False
    is_not_finite: bool = False
    _last: tuple[int, Message] | None = None

    def end(self) -> None:
        """All goes well from now on, unless it is stuck already."""
        self.fails_at, self.mumbles, self.is_not_finite = None, None, False

    def fails(self, request: AnyRequest) -> bool:
        """Whether it comes upon an error in this one."""
        found = self.fails_at is not None and isinstance(request, self.fails_at)
        if found:
            self.fails_at = None
        return found

    def replies(
        self, number: int, message: Message, is_last: bool
    ) -> Iterator[tuple[int, Message]]:
        """What it sends for an answer, which `is_last` if it leaves then."""
        mumbles = self.mumbles
        if mumbles == "again" and self._last is not None:
            yield self._last
            self.mumbles = None
        elif mumbles in ("kind", "epoch") and not (
            is_last or _tells_of_failure(message)
        ):
            message = _mumbled(mumbles, message)
            self.mumbles, self.has_mumbled = None, True
        self._last = number, message
        yield self._last

    def stages(self) -> list[StageNumbers]:
        """What a check of its state finds."""
        is_finite, self.is_not_finite = not self.is_not_finite, False
        return [StageNumbers(stage=(0, 0), is_finite=is_finite, digests=())]


def _tells_of_failure(message: Message) -> bool:
    """Whether all requests may be answered so: another kind might be right, too."""
    return isinstance(message, (schema.RequestFailed, schema.Lost))


def _mumbled(how: Mumble | None, message: Message) -> Message:
    if how == "epoch":
        return replace(message, epoch=message.epoch - 1)
    if isinstance(message, schema.Address):
        return schema.Reached(
            at=None, commit=None, is_broken_off=False, epoch=message.epoch
        )
    return schema.Address(address="nowhere:1", epoch=message.epoch)
