# SPDX-License-Identifier: Apache-2.0
"""Generates text with a model, piece by piece.

Owns the end of a text, and the rule that no partial character is shown, nor a possible
beginning of the stop text. Does not own the probabilities of tokens (`decoding.py`) nor
their choice (`sampling.py`).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from hetjax.data.tokenizer import Tokenizer
from hetjax.serving.decoding import Text
from hetjax.serving.sampling import Sampling, choose

Reason = Literal["end", "stop", "tokens", "max_seq_len"]
_HALF = "\ufffd"  # shown by a tokenizer for a partial character


def generated(
    new_text: Callable[[int], Text],
    max_seq_len: int,
    prompt: Sequence[int],
    num_tokens: int,
    sampling: Sampling,
    num_words: int,
) -> Iterator[int]:
    """Yield `num_tokens` tokens after the prompt, or as many as the model allows.

    `new_text` returns a text with room for the given number of tokens. Yielded tokens
    are below `num_words`, as a model may have more rows than a tokenizer has ids. The
    same seed gives the same tokens.
    """
    assert 0 < len(prompt) <= max_seq_len
    num_tokens = min(num_tokens, max_seq_len - len(prompt) + 1)
    if num_tokens < 1:
        return
    rng = np.random.default_rng(sampling.seed)
    text = new_text(len(prompt) + num_tokens - 1)
    token = choose(text.prefill(prompt)[:num_words], sampling, rng)
    yield token
    for _ in range(num_tokens - 1):
        token = choose(text.decode(token)[:num_words], sampling, rng)
        yield token


@dataclass(slots=True)
class Writing:
    """Tokens that become text; at the end, `reason` says why the text ended."""

    tokenizer: Tokenizer
    ends: Collection[int]  # tokens that end the text, and are not shown
    stop: str | None = None
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    reason: Reason | None = None
    _waiting: str = ""  # may be the beginning of the stop text
    _from: int = 0  # tokens before this are no longer decoded
    _to: int = 0  # tokens from `_from` to this are shown already

    def write(self, token: int) -> str:
        """Add the next token; return the text that can now be shown."""
        assert self.reason is None
        self.tokens.append(token)
        if token in self.ends:
            self.reason = "end"
            return self._shown(self._waiting)
        return self._looked_through(self._decoded())

    def end(self, reason: Reason) -> str:
        """Return the rest of the text; no more tokens come."""
        if self.reason is not None:
            return ""
        piece = self._looked_through(self._decoded(whole=True))
        if self.reason is None:
            self.reason = reason
            piece += self._shown(self._waiting)
        return piece

    def _decoded(self, whole: bool = False) -> str:
        """Return the text that new tokens add; it may depend on tokens before them."""
        before = self.tokenizer.decode(self.tokens[self._from : self._to])
        after = self.tokenizer.decode(self.tokens[self._from :])
        if after.endswith(_HALF) and not whole:
            return ""
        self._from, self._to = self._to, len(self.tokens)
        return after[len(before) :]

    def _looked_through(self, piece: str) -> str:
        self._waiting += piece
        if not self.stop:
            return self._shown(self._waiting)
        before, found, _ = self._waiting.partition(self.stop)
        if found:
            self.reason = "stop"
            return self._shown(before)
        most = min(len(self.stop) - 1, len(self._waiting))
        held = next(
            n for n in range(most, -1, -1) if self._waiting.endswith(self.stop[:n])
        )
        return self._shown(self._waiting[: len(self._waiting) - held])

    def _shown(self, piece: str) -> str:
        self._waiting = self._waiting[len(piece) :]
        self.text += piece
        return piece


def write_text(
    tokens: Iterator[int],
    writing: Writing,
    said: Callable[[str], None],
    *,
    asked: int,
) -> None:
    """Write tokens until the text ends; `said` gets each piece."""
    for token in tokens:
        if piece := writing.write(token):
            said(piece)
        if writing.reason is not None:
            return
    reason: Reason = "tokens" if len(writing.tokens) == asked else "max_seq_len"
    if piece := writing.end(reason):
        said(piece)
