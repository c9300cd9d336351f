# SPDX-License-Identifier: Apache-2.0
"""Encodes completions and conversations as tokens, some of which are learnt.

Owns which tokens of a row count for the loss. Does not own how a conversation is
written (`chat_template.py`), ids (`tokenizer.py`) nor files (`building.py`).
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import tokenizers

from hetjax.data.chat.chat_template import ChatTemplate
from hetjax.data.chat.sandbox import Span, TemplateRefuses
from hetjax.data.chat.turns import Written
from hetjax.data.sources.messages import LEARNT_FIELDS
from hetjax.data.sources.rows import Completion, Conversation, canonical
from hetjax.data.tokenizer import Tokenizer, panics_refused
from hetjax.errors import BadInput, counted_noun

_ROWS_PER_CALL = 1_000
_BYTES_PER_CALL = 1 << 24
_MOST_NAMES = 20  # of fields that are named in a warning


@dataclass(frozen=True, kw_only=True, slots=True)
class LearntRow:
    """Tokens, and which of them are learnt; `num_bytes` is that of the learnt text."""

    tokens: list[int]
    learnt: list[bool]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RowEncoder:
    """Encodes rows in the form that the model expects."""

    ids: Tokenizer
    template: ChatTemplate | None

    def encoded(
        self,
        rows: Iterable[Completion | Conversation],
        done_bytes: Callable[[int], None] = lambda size: None,
    ) -> Iterator[LearntRow]:
        """Yield the rows that have something to learn; warn once of those without.

        A conversation makes several rows if the template writes its earlier answers
        differently from the last one. Raises BadInput if the template cannot write it.
        """
        notes = _Notes()
        for group, num_bytes in _groups(rows):
            written = [*self._written(group, notes)]
            texts = [one.text for one in written]
            core = self.ids.core
            with panics_refused():
                encodings = core.encode_batch(texts, add_special_tokens=False)
            for one, encoding in zip(written, encodings, strict=True):
                row = self._row(one, isinstance(one, _Document), encoding)
                notes.num_without += not any(row.learnt[1:])
                if any(row.learnt[1:]):
                    yield row
            done_bytes(num_bytes)
        notes.warn()

    def _written(
        self, rows: list[Completion | Conversation], notes: "_Notes"
    ) -> Iterator[Written]:
        """Yield rows as texts, in their order."""
        chats = [row for row in rows if isinstance(row, Conversation)]
        if chats and self.template is None:
            raise _no_template()
        texts = self._by_template(chats, notes) if chats else iter(())
        for row in rows:
            if isinstance(row, Conversation):
                yield from next(texts)
            else:
                text = row.prompt + row.completion
                yield _Document(text, [(len(row.prompt), len(text))])

    def _by_template(
        self, chats: list[Conversation], notes: "_Notes"
    ) -> Iterator[list[Written]]:
        assert self.template is not None
        for chat, found in zip(chats, self.template.written(chats), strict=True):
            if isinstance(found, TemplateRefuses):
                raise _refused(chat, str(found)) from found
            notes.add(chat, found, self.template)
            yield found

    def _row(
        self, written: Written, is_document: bool, encoding: tokenizers.Encoding
    ) -> LearntRow:
        tokens = encoding.ids
        learnt = _within(encoding.offsets, written.spans)
        if is_document:
            opening = list(self.ids.opening)
            tokens = [*opening, *tokens, self.ids.end_of_document]
            learnt = [*(False for _ in opening), *learnt, True]
        num_bytes = sum(len(written.text[a:b].encode()) for a, b in written.spans)
        return LearntRow(tokens=tokens, learnt=learnt, num_bytes=num_bytes)


class _Document(Written):
    """A text between the opening and the end of a document."""


@dataclass(slots=True)
class _Notes:
    """Collects warnings about rows, to be shown once all are encoded."""

    num_without: int = 0
    num_open: int = 0
    unread: dict[str, None] = field(default_factory=dict)
    known: set[str] = field(default_factory=lambda: {"role", "content", *LEARNT_FIELDS})

    def add(
        self, chat: Conversation, found: list[Written], template: ChatTemplate
    ) -> None:
        self.num_open += sum(one.num_open for one in found)
        if chat.tools:
            self._check_read("tools", template)
        for name in chat.template_arguments:
            self._check_read(name, template)
        for message in chat.messages:
            for name, given in message.items():
                if given is not None and name not in self.known:
                    if name == "tool_calls" and given and not template.reads(name):
                        raise _refused(chat, "it does not read tool_calls")
                    self._check_read(name, template)

    def _check_read(self, name: str, template: ChatTemplate) -> None:
        if name in self.known:
            return
        self.known.add(name)
        if not template.reads(name):
            self.unread[name] = None

    def warn(self) -> None:
        if self.unread:
            names = ", ".join(map(repr, [*self.unread][:_MOST_NAMES]))
            _warn(f"rows have {names}, which the chat template does not read")
        if self.num_open:
            _warn(
                f"the chat template leaves {self.num_open} answers out or ends them "
                "without a special token, so they do not teach the model where to stop"
            )
        if self.num_without:
            rows = counted_noun(self.num_without, "row")
            _warn(f"left out: {rows} without an answer to learn")


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def _groups(
    rows: Iterable[Completion | Conversation],
) -> Iterator[tuple[list[Completion | Conversation], int]]:
    """Yield groups of rows to write and encode at once, with the bytes of each."""
    group, num_bytes = list[Completion | Conversation](), 0
    for row in rows:
        group.append(row)
        num_bytes += len(canonical(row).encode())
        if len(group) == _ROWS_PER_CALL or num_bytes > _BYTES_PER_CALL:
            yield group, num_bytes
            group, num_bytes = [], 0
    if group:
        yield group, num_bytes


def _within(offsets: list[Span], spans: list[Span]) -> list[bool]:
    """Return which tokens have a character in one of the (ordered) spans."""
    found, at = [], 0
    for start, end in offsets:
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        found.append(at < len(spans) and end > max(start, spans[at][0]))
    return found


def _no_template() -> BadInput:
    return BadInput(
        got="rows of messages, or of a prompt and its response, but a tokenizer "
        "without a chat template",
        allowed="for messages, the tokenizer of a model that has a chat_template; for "
        'texts or {"prompt": ..., "completion": ...}, any tokenizer',
        fix="train with the --data.tokenizer FOLDER of a chat model; or, for rows of a "
        "prompt and its response, give --data.format completion (eval: --format)",
    )


def _refused(row: Conversation, why: str) -> BadInput:
    roles = ", ".join(str(message["role"]) for message in row.messages)
    return BadInput(
        got=f"messages of the roles {roles} that the chat template refuses: {why}",
        allowed="messages in an order that the model's chat template accepts",
        fix=f"correct or delete the row that begins {canonical(row)[:80]!r}, or give "
        "the tokenizer a chat template that writes it",
    )
