# SPDX-License-Identifier: Apache-2.0
"""The messages between a controller and workers whose model is used, not trained.

Owns a class for each request, and for what answers it. Does not own those that come
before: how workers are built, joined and given their weights (`schema.py`).
"""

from collections.abc import Sequence

from hetjax.runtime.execution.use import Piece, RowLosses
from hetjax.runtime.rpc.message import Message, Request
from hetjax.runtime.rpc.schema import NextLogits


class Scored(Message):
    """Summed losses of rows of which the worker leads the last stage."""

    losses: Sequence[RowLosses]


class Score(Request[Scored], minutes=120, what="compile for a batch, and score it"):
    """Tell the losses of the rows of a global batch; uncounted targets have none."""

    inputs: Sequence[Sequence[int]]
    targets: Sequence[Sequence[int]]
    turn: int


class GoOn(Request[NextLogits], minutes=120, what="compile for a text, and go on"):
    """Tell the logits of what follows a piece of a text, after those before it."""

    piece: Piece
    turn: int
