# SPDX-License-Identifier: Apache-2.0
"""Finds the assistant's answers in the text that a chat template writes.

A template with generation blocks marks them. For other templates, let a be the text of
the messages before an answer, with the generation prompt, and b the text of the
messages up to the answer: the answer is what b has beyond a. If the whole text does not
begin with b, as in templates that leave earlier reasoning out, the answer is learnt in
a separate row. Owns these rules. Does not own rendering (`sandbox.py`).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from hetjax.data.chat.sandbox import SandboxedTemplate, Span, TemplateRefuses
from hetjax.data.sources.messages import Message, is_learnt, turn
from hetjax.data.sources.rows import Conversation
from hetjax.files.parsing import Malformed, json_value

# Marks the end of a message during the search for it; no template changes a word
_END = "HETJAX7END7OF7MESSAGE"
_TELLING_CHARS = 16  # so much of an answer is in no template by chance
_QUESTION = (turn("user", "question"),)
_OPENED_THOUGHT = re.compile(r"<think>\s*(</think>\s*)?\Z")


@dataclass(frozen=True, slots=True)
class Written:
    """A text, and the spans of it that the assistant has to write.

    `num_open` is the number of its answers that no special token ends.
    """

    text: str
    spans: list[Span]
    num_open: int = 0


class _WritesAnother(TemplateRefuses):
    """The template writes a text that does not match the messages."""


def written(
    template: SandboxedTemplate, chat: Conversation, special: Sequence[str] = ()
) -> list[Written]:
    """Return the texts that teach the answers of a conversation: mostly a single text.

    `special` are the tokenizer's special tokens. Raises TemplateRefuses with the
    template's objection to the messages, or the reason why answers cannot be found.
    """
    refusals = list[TemplateRefuses]()
    for way in _ways(chat):
        try:
            found = _written(template, way, special)
            _check_written(found, way)
            _check_answers(template, found, way)
            return found
        except TemplateRefuses as error:
            refusals.append(error)
    # a wrong text is more informative than the reason why there was no text
    others = [one for one in refusals if isinstance(one, _WritesAnother)]
    raise (others or refusals)[0]


def _ways(chat: Conversation) -> Iterator[Conversation]:
    """Yield the same conversation in the forms that templates expect.

    Arguments of tool calls become objects, then JSON text. For each of these, messages
    without content stay as they are, then get "", then null.
    """
    has_calls = any(message.get("tool_calls") for message in chat.messages)
    is_silent = any(map(_is_silent, chat.messages))
    for arguments in (_as_object, _as_json) if has_calls else (None,):
        called = chat.messages
        if arguments is not None:
            called = tuple(_with_calls(m, arguments) for m in called)
        yield replace(chat, messages=called)
        for content in ("", None) if is_silent else ():
            messages = (
                {**m, "content": content} if _is_silent(m) else m for m in called
            )
            yield replace(chat, messages=tuple(messages))


def _is_silent(message: Message) -> bool:
    """Whether it has no content; empty content counts only beside tool calls."""
    is_empty = message.get("content") == "" and bool(message.get("tool_calls"))
    return message.get("content") is None or is_empty


def _with_calls(message: Message, arguments: Any) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [_with_arguments(call, arguments) for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _with_arguments(call: Any, arguments: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if "arguments" in call:
        return {**call, "arguments": arguments(call["arguments"])}
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_arguments(call["function"], arguments)}
    return call


def _as_object(arguments: Any) -> Any:
    try:
        found = json_value(arguments) if isinstance(arguments, str) else arguments
    except Malformed:
        return arguments
    return found if isinstance(found, dict) else arguments


def _as_json(arguments: Any) -> Any:
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


def _check_written(found: list[Written], chat: Conversation) -> None:
    """Refuse texts that lack calls, or that contain values in Python's notation."""
    given = json.dumps([chat.messages, chat.tools], ensure_ascii=False, default=str)
    is_silent = any(message.get("content") is None for message in chat.messages)
    arguments = (
        _function(c).get("arguments") for m in chat.messages for c in _calls(m)
    )
    objects = [one for one in arguments if isinstance(one, dict) and one]
    said = "".join(one.text[a:b] for one in found for a, b in one.spans)
    for call in (c for m in chat.messages if is_learnt(m) for c in _calls(m)):
        if (name := str(_function(call).get("name", ""))) not in said:
            raise _WritesAnother(f"it leaves out the call of {name[:40]!r}")
    for text in (one.text for one in found):
        if is_silent and "None" in text and "None" not in given:
            raise _WritesAnother("it writes None for a message without content")
        if any(repr(one) in text and repr(one) not in given for one in objects):
            raise _WritesAnother("it writes arguments of calls in Python's notation")


def _check_answers(
    template: SandboxedTemplate, found: list[Written], chat: Conversation
) -> None:
    """Refuse texts that lack an answer's content, which may be escaped or trimmed."""
    said = "".join(one.text[a:b] for one in found for a, b in one.spans)
    for index, message in enumerate(chat.messages):
        content = message.get("content") or ""
        shown = content.rpartition("</think>")[2].strip()
        is_there = len(shown) >= _TELLING_CHARS and shown in said
        if is_learnt(message) and shown and not is_there:
            marked = list(chat.messages[: index + 1])
            marked[index] = {**message, "content": content + _END}
            rendered = _Rendered(template, chat)
            is_left_out = _END not in rendered.render(marked)[0]
            if is_left_out and rendered.whole(index + 1) != rendered.whole(index):
                raise _WritesAnother(f"it leaves out message {index + 1}")


def _calls(message: Message) -> Sequence[Any]:
    return message.get("tool_calls") or ()


def _function(call: Any) -> Mapping[str, Any]:
    """Return the part of a call with its name and arguments."""
    inner = call.get("function", call) if isinstance(call, Mapping) else {}
    return inner if isinstance(inner, Mapping) else {}


def _written(
    template: SandboxedTemplate, chat: Conversation, special: Sequence[str]
) -> list[Written]:
    wanted = [i for i, m in enumerate(chat.messages) if is_learnt(m)]
    if template.has_blocks:
        return [_by_blocks(template, chat, wanted)]
    return _Turns(template, chat, special).rows(wanted)


def _by_blocks(
    template: SandboxedTemplate, chat: Conversation, wanted: Sequence[int]
) -> Written:
    """Return the text with its blocks, without those of answers that are not learnt."""
    rendered = _Rendered(template, chat)
    text, spans = rendered.whole(len(chat.messages))
    answers = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant"]
    if len(wanted) == len(answers):
        return Written(text, spans)
    left_out: set[int] = set()
    for index in {*answers} - {*wanted}:
        before = len(rendered.whole(index)[1]) if index else 0
        left_out |= {*range(before, len(rendered.whole(index + 1)[1]))}
    kept = [span for number, span in enumerate(spans) if number not in left_out]
    return Written(text, kept)


class _Rendered:
    """What the template writes for the first messages, rendered once per count."""

    def __init__(self, template: SandboxedTemplate, chat: Conversation) -> None:
        self._template, self._chat = template, chat
        self.whole = cache(self._whole)

    def _whole(self, count: int) -> tuple[str, list[Span]]:
        return self.render(self._chat.messages[:count])

    def prompt(self, count: int) -> str:
        """Return the text of the first messages with the prompt for an answer."""
        return self.render(self._chat.messages[:count], add_generation_prompt=True)[0]

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=self._chat.tools,
            arguments=self._chat.template_arguments,
        )


class _Turns:
    """The answers of a conversation under a template without generation blocks."""

    def __init__(
        self, template: SandboxedTemplate, chat: Conversation, special: Sequence[str]
    ) -> None:
        self._rendered = _Rendered(template, chat)
        self._messages, self._special = chat.messages, tuple(special)
        self._eos = template.special_tokens.get("eos_token", "")
        self._header = cache(self._find_header)

    def rows(self, wanted: Sequence[int]) -> list[Written]:
        """Return the whole text, after texts that end with answers not found in it."""
        count, rows = len(self._messages), list[Written]()
        left = list(wanted)
        text = self._rendered.whole(count)[0]
        if not left:
            return [Written(text, [])]
        while left:
            text = self._rendered.whole(count)[0]
            found = {index: self._turn(index, text) for index in left}
            if spans := [(i, span) for i, span in found.items() if span is not None]:
                rows.append(self._ended(text, spans, count))
            left = [index for index, span in found.items() if span is None]
            count = left[-1] + 1 if left else 0
        return rows[::-1]

    def _turn(self, index: int, text: str) -> Span | None:
        """Return the answer's span in the text; None if it needs a row of its own."""
        until = self._rendered.whole(index + 1)[0]
        shown = until.rstrip()
        if text.startswith(until) or text.startswith(self._without_eos(shown)):
            if not text.startswith(until):
                shown = self._without_eos(shown).rstrip()
            return self._start(index, until), len(shown)
        return self._marked(index, text)

    def _without_eos(self, text: str) -> str:
        """Remove the token that some templates put only after the last message."""
        return text.removesuffix(self._eos) if self._eos else text

    def _start(self, index: int, until: str) -> int:
        """Return where the answer begins in a text that ends with it."""
        prompt = self._rendered.prompt(index)
        opened = _OPENED_THOUGHT.sub("", prompt)
        for begun in (prompt, prompt.rstrip(), opened, opened.rstrip()):
            if until.startswith(begun):
                has_header = opened.rstrip().endswith(self._header().rstrip())
                skipped = 0 if has_header else self._past_header(until[len(begun) :])
                return len(begun) + skipped
        raise TemplateRefuses(
            f"message {index + 1} does not follow its generation prompt"
        )

    def _past_header(self, answer: str) -> int:
        """Return the end, in the answer, of a header that the prompt lacked."""
        for header in (self._header(), self._header().rstrip()):
            if header in answer:
                return answer.index(header) + len(header)
        return 0

    def _find_header(self) -> str:
        """Return the prompt for an answer, without an opened thought."""
        try:
            before = self._rendered.render(_QUESTION)[0]
            prompt = self._rendered.render(_QUESTION, add_generation_prompt=True)[0]
        except TemplateRefuses:
            return ""
        before = before if prompt.startswith(before) else self._without_eos(before)
        if not prompt.startswith(before):
            return ""
        return _OPENED_THOUGHT.sub("", prompt[len(before) :]).lstrip()

    def _marked(self, index: int, text: str) -> Span | None:
        """Return the span of an earlier answer that is written unlike a last one."""
        prompt = self._rendered.prompt(index)
        content = self._messages[index].get("content")
        if not content or not text.startswith(prompt):
            return None
        for shown in (content, content.rstrip()):  # some templates strip it
            marked = [dict(message) for message in self._messages]
            marked[index]["content"] = shown + _END
            before, _, after = self._rendered.render(marked)[0].partition(_END)
            if before + after == text:
                last = self._rendered.render(marked[: index + 1])[0]
                last = last.partition(_END)[2].rstrip()
                if after.startswith(last):
                    return len(prompt), len(before + last)
        return None

    def _ended(
        self, text: str, spans: Sequence[tuple[int, Span]], count: int
    ) -> Written:
        """Extend each span by the token that ends it, even if that starts a header."""
        ended, num_open = list[Span](), 0
        for index, (start, end) in spans:
            if self._special and not text[:end].endswith(self._special):
                is_last = index == count - 1 and not text[end:].strip()
                if is_last and (more := self._follows(index, text[:end])):
                    text = text[:end] + more
                size = self._next_token(text, end)
                num_open += size == 0
                end += size
            ended.append((start, end))
        return Written(text, ended, num_open)

    def _next_token(self, text: str, end: int) -> int:
        """Return the length of a special token that comes next, with blanks before."""
        rest = text[end:]
        shown = rest.lstrip()
        sizes = [len(one) for one in self._special if one and shown.startswith(one)]
        return len(rest) - len(shown) + max(sizes) if sizes else 0

    def _follows(self, index: int, text: str) -> str:
        """Return the special token that begins any text after the last answer."""
        calls = self._messages[index].get("tool_calls")
        asks = turn("tool" if calls else "user", "question")
        answered = (*_QUESTION, turn("assistant", "answer"))
        for messages in self._messages[: index + 1], answered:
            ended = text if messages is not answered else self._text(answered).rstrip()
            more = self._text([*messages, asks])
            if more.startswith(ended):
                size = self._next_token(more, len(ended))
                return more[len(ended) :][:size]
        return ""

    def _text(self, messages: Sequence[Message]) -> str:
        try:
            return self._rendered.render(messages)[0]
        except TemplateRefuses:
            return ""
