# SPDX-License-Identifier: Apache-2.0
"""Defines messages that gather a checkpoint's parts on the controller's machine.

Owns a class for each request and answer. Does not own when parts are sent
(`runtime/control/gathering.py`) nor how (`checkpoint/replication.py`).
"""

from collections.abc import Sequence

from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.runtime.rpc.message import Message, Request


class PartSize(Message):
    """The bytes of the worker's part of a step, 0 if it has none, and its attempt."""

    num_bytes: int
    attempt: str


class PartSent(Message):
    """Why the worker could not send its part; empty if it could."""

    failure: str


class TellPartSize(
    Request[PartSize], minutes=10, what="report the size of its checkpoint"
):
    """Report on the part of a step that is on this worker's disk."""

    storage: CheckpointStorage
    step: int


class SendPart(Request[PartSent], minutes=120, what="send its part of a checkpoint"):
    """Send the part of a step to the controller's machine, which then keeps no other
    parts of this worker, except those of the steps in `also` (at most two)."""

    storage: CheckpointStorage
    step: int
    also: Sequence[int]
