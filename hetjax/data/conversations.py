# SPDX-License-Identifier: Apache-2.0
"""Prompts with completions, and conversations, as tokens of which some are learnt.

Owns which tokens of a row count for the loss. Does not own how a conversation is
written (`chat_template.py`), ids (`tokenizer.py`) nor files (`building.py`).
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import tokenizers

from hetjax.data.chat_template import ChatTemplate, Span, TemplateRefuses
from hetjax.data.rows import Completion, Conversation, canonical
from hetjax.data.tokenizer import Tokenizer
from hetjax.errors import BadInput

_ROWS_PER_CALL = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class LearntRow:
    """Tokens and which of them count; `num_bytes` are those of the text that does."""

    tokens: list[int]
    learnt: list[bool]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Written:
    """A row as text, and the characters of it that are learnt."""

    text: str
    spans: list[Span]
    is_document: bool  # between the opening and the end, as a document is


@dataclass(frozen=True, slots=True)
class RowEncoder:
    """Writes rows as the model wants them."""

    ids: Tokenizer
    template: ChatTemplate | None

    def encoded(
        self,
        rows: Iterable[Completion | Conversation],
        done_bytes: Callable[[int], None] = lambda size: None,
    ) -> Iterator[LearntRow]:
        """Yield the rows that have something to learn; warn once of those without.

        BadInput for a conversation that the template cannot write.
        """
        rows, num_without = iter(rows), 0
        while group := list(islice(rows, _ROWS_PER_CALL)):
            written = [self._written(row) for row in group]
            texts = [one.text for one in written]
            core = self.ids.core
            encodings = core.encode_batch(texts, add_special_tokens=False)
            for one, encoding in zip(written, encodings, strict=True):
                row = self._row(one, encoding)
                num_without += not any(row.learnt[1:])
                if any(row.learnt[1:]):
                    yield row
            done_bytes(sum(len(canonical(row).encode()) for row in group))
        if num_without:
            message = f"{num_without} rows in which the assistant says nothing"
            warnings.warn(f"{message} are left out", stacklevel=2)

    def _written(self, row: Completion | Conversation) -> _Written:
        if isinstance(row, Completion):
            text = row.prompt + row.completion
            return _Written(text, [(len(row.prompt), len(text))], True)
        if self.template is None:
            raise _no_template()
        try:
            return _Written(*self.template.assistant_spans(row.messages), False)
        except TemplateRefuses as refused:
            raise _refused(row, str(refused)) from refused

    def _row(self, written: _Written, encoding: tokenizers.Encoding) -> LearntRow:
        tokens = encoding.ids
        learnt = _within(encoding.offsets, written.spans)
        if written.is_document:
            opening = list(self.ids.opening)
            tokens = [*opening, *tokens, self.ids.end_of_document]
            learnt = [*(False for _ in opening), *learnt, True]
        num_bytes = sum(len(written.text[a:b].encode()) for a, b in written.spans)
        return LearntRow(tokens=tokens, learnt=learnt, num_bytes=num_bytes)


def _within(offsets: list[Span], spans: list[Span]) -> list[bool]:
    """Which tokens have a character in one of the spans, which are in order."""
    found, at = [], 0
    for start, end in offsets:
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        found.append(at < len(spans) and end > max(start, spans[at][0]))
    return found


def _no_template() -> BadInput:
    return BadInput(
        got="rows with messages, and a tokenizer without a chat template",
        allowed="messages with the tokenizer of a model that has a chat_template; "
        'rows of texts, or of {"prompt": ..., "completion": ...}, with any',
        fix="give --data.tokenizer FOLDER of a chat model, or other rows",
    )


def _refused(row: Conversation, why: str) -> BadInput:
    roles = ", ".join(str(message["role"]) for message in row.messages)
    return BadInput(
        got=f"messages of the roles {roles} that the chat template refuses: {why}",
        allowed="messages in the order that the model's chat template takes; the "
        "assistant's are found by {% generation %} blocks, or by the prompt for them",
        fix="mend the row that begins "
        f"{canonical(row)[:80]!r}, or put generation blocks into the template",
    )
