# SPDX-License-Identifier: Apache-2.0
"""Defines messages between a controller and workers whose model is used, not trained.

Owns a class for each request and answer, and arrays in them: as text, which JSON reads
as one value instead of one per number. Does not own earlier messages: how workers are
built, joined and given their weights (`schema.py`).
"""

from base64 import b64decode, b64encode
from collections.abc import Sequence

import numpy as np

from hetjax.runtime.execution.serving import RowLosses, TextPiece
from hetjax.runtime.rpc.message import Message, Request


def array_text(values: np.ndarray) -> str:
    """Return the numbers as text, without shape and dtype."""
    return b64encode(np.ascontiguousarray(values).tobytes()).decode()


def text_array(text: str, dtype: type[np.generic], num_rows: int = 1) -> np.ndarray:
    """Return the numbers of a text, in so many rows."""
    return np.frombuffer(b64decode(text), dtype).reshape(num_rows, -1)


class Scored(Message):
    """Summed losses of rows whose last stage the worker leads."""

    losses: Sequence[RowLosses]


class ContinuedText(Message):
    """logits_V (float32 as text), from the one worker that has them."""

    logits: str | None


class Score(Request[Scored], minutes=120, what="compile for a batch, and score it"):
    """Report the losses of the rows (int32 as text) of a global batch.

    Targets that do not count have no loss.
    """

    num_rows: int
    inputs: str
    targets: str
    turn: int


class ContinueText(
    Request[ContinuedText], minutes=120, what="compile for a text, and continue it"
):
    """Report the logits of what follows a piece of a text, after earlier pieces."""

    piece: TextPiece
    turn: int
