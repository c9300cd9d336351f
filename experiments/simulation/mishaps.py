# SPDX-License-Identifier: Apache-2.0
"""Makes a live simulated worker misbehave.

Owns these faults of a worker, and the answers that result. Does not own when they are
drawn (`faults.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from hetjax.runtime.execution.checking.checks import StageNumbers
from hetjax.runtime.rpc import schema
from hetjax.runtime.rpc.message import AnyRequest
from hetjax.runtime.rpc.schema import Message

# An answer of the wrong kind or epoch, or the previous answer again
Mumble = Literal["kind", "epoch", "again"]


@dataclass
class Mishaps:
    """The pending faults of a worker; `has_mumbled` after an answer that is invalid.

    A worker that `is_stuck` gives signs of life but does nothing. `fails_at` is the
    kind of request at which it fails.
    """

    is_stuck: bool = False
    fails_at: type | None = None
    mumbles: Mumble | None = None
    has_mumbled: bool = False
    is_not_finite: bool = False
    _last: tuple[int, Message] | None = None

    def end(self) -> None:
        """Cancel all pending faults; a stuck worker stays stuck."""
        self.fails_at, self.mumbles, self.is_not_finite = None, None, False

    def fails(self, request: AnyRequest) -> bool:
        """Whether the worker fails at this request."""
        found = self.fails_at is not None and isinstance(request, self.fails_at)
        if found:
            self.fails_at = None
        return found

    def replies(
        self, number: int, message: Message, is_last: bool
    ) -> Iterator[tuple[int, Message]]:
        """Yield the messages of an answer; `is_last` if the worker then leaves."""
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
        """Return the result of a check of the worker's state."""
        is_finite, self.is_not_finite = not self.is_not_finite, False
        return [StageNumbers(stage=(0, 0), is_finite=is_finite, digests=())]


def _tells_of_failure(message: Message) -> bool:
    """Whether this kind of message may answer every request.

    A wrong kind would then be no mistake.
    """
    return isinstance(message, (schema.RequestFailed, schema.Lost))


def _mumbled(how: Mumble | None, message: Message) -> Message:
    if how == "epoch":
        return replace(message, epoch=message.epoch - 1)
    if isinstance(message, schema.Address):
        return schema.Reached(
            at=None, commit=None, is_aborted=False, epoch=message.epoch
        )
    return schema.Address(address="nowhere:1", epoch=message.epoch)
