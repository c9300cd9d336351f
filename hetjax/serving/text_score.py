# SPDX-License-Identifier: Apache-2.0
"""Scores how well a model predicts a text: nats per token, perplexity, bits per byte.

Owns which tokens of a row count. In a document, all tokens of its text count, but not
those that the model expects before it. In completions and conversations, the tokens
that training learns count. Does not own files (`data/sources/readers.py`).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from hetjax.data.chat.conversations import RowEncoder
from hetjax.data.sources.rows import Row
from hetjax.serving.scoring import Scorer, Window, windows


@dataclass(frozen=True, kw_only=True, slots=True)
class TextScore:
    """The prediction quality of a text; `num_bytes` counts the UTF-8 of counted text.

    With LL the sum of log-likelihoods (nats): `loss` = -LL / tokens, `perplexity` =
    exp(loss), `bits_per_byte` = -LL / ln 2 / bytes.
    """

    loss: float
    num_tokens: int
    num_bytes: int
    num_rows: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # larger values overflow

    @property
    def bits_per_byte(self) -> float:
        return self.loss * self.num_tokens / math.log(2) / self.num_bytes


@dataclass(slots=True)
class _Counts:
    rows: int = 0
    bytes: int = 0


def score_text(
    scores: Scorer,
    encoder: RowEncoder,
    rows: Iterable[Row],
    *,
    length: int,
    stride: int,
    scored: Callable[[int], None] = lambda num_tokens: None,
) -> TextScore | None:
    """Score all rows in windows of `length` inputs, which start `stride` apart.

    Each token counts once. `scored` is called with the number of counted tokens so far.
    Return None if no token counts.
    """
    counts, total, num_tokens = _Counts(), 0.0, 0
    given = _windows(encoder, rows, counts, length, stride)
    for window, found in scores(given, length=length):
        total += found
        num_tokens += sum(window.counted)
        scored(num_tokens)
    if not num_tokens or not counts.bytes:
        return None
    return TextScore(
        loss=-total / num_tokens,
        num_tokens=num_tokens,
        num_bytes=counts.bytes,
        num_rows=counts.rows,
    )


def _windows(
    encoder: RowEncoder, rows: Iterable[Row], counts: _Counts, length: int, stride: int
) -> Iterator[Window]:
    for row in rows:
        counts.rows += 1
        for tokens, counted, num_bytes in _encoded(encoder, row):
            counts.bytes += num_bytes
            yield from windows(tokens, counted, length=length, stride=stride)


def _encoded(
    encoder: RowEncoder, row: Row
) -> Iterator[tuple[list[int], list[bool], int]]:
    """Yield tokens, which of them count, and the bytes of those."""
    if isinstance(row, str):
        before, tokens = encoder.ids.start(""), encoder.ids.encode(row)
        counted = [False] * len(before) + [True] * len(tokens)
        yield [*before, *tokens], counted, len(row.encode())
        return
    for found in encoder.encoded([row]):
        yield found.tokens, [False, *found.learnt[1:]], found.num_bytes
