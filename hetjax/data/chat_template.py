# SPDX-License-Identifier: Apache-2.0
"""Chat templates: a conversation as the one text that a model was trained to read.

Rendered as `transformers` renders them, in Jinja's sandbox, since templates come with
models from anywhere. Owns the sandbox and where in the text the assistant speaks. Does
not own the files of templates (`hugging_face.py`) nor tokens (`conversations.py`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hetjax.errors import BadInput

Message = Mapping[str, Any]
Span = tuple[int, int]  # characters of the rendered text, the end excluded

ASSISTANT = "assistant"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Stands for the end of a message while it is looked for; no template changes a word
_END = "HETJAX7END7OF7MESSAGE"
# Names under which reasoning is passed, the first of which templates read
_REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateRefuses(Exception):
    """The template cannot write these messages, or not so that turns can be found."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template over `messages`, with the names of special tokens."""

    source: str
    special_tokens: Mapping[str, str]

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> str:
        """Give the text; TemplateRefuses says what the template had against it."""
        return self._render(messages, add_generation_prompt)[0]

    def assistant_spans(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """Give the text, and the characters of it that the assistant has to write.

        They are what the template puts between generation and endgeneration; where it
        has no such block, what follows the prompt for an answer, up to the last
        character of the turn that is not blank.
        """
        if _GENERATION.search(self.source):
            return self._render(messages, False)
        text = self.render(messages)
        turns = [i for i, m in enumerate(messages) if m["role"] == ASSISTANT]
        return text, [self._turn(messages, index, text) for index in turns]

    def _turn(self, messages: Sequence[Message], index: int, text: str) -> Span:
        prompt = self.render(messages[:index], add_generation_prompt=True)
        if not text.startswith(prompt):
            raise TemplateRefuses(
                f"message {index + 1} does not follow the text that asks for it"
            )
        content = messages[index]["content"]
        for shown in (content, content.rstrip()):  # some templates strip it
            marked = [dict(message) for message in messages]
            marked[index]["content"] = shown + _END
            before, _, after = self.render(marked).partition(_END)
            if before + after == text:
                last = self.render(marked[: index + 1]).partition(_END)[2].rstrip()
                if after.startswith(last):
                    return len(prompt), len(before + last)
        raise TemplateRefuses(f"message {index + 1} cannot be found in what it writes")

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool
    ) -> tuple[str, list[Span]]:
        template = self._compiled
        tracker: Any = template.environment
        blocks: list[str] = []
        spans: list[Span] = []
        tracker.speaking.begin(blocks, spans)
        try:
            pieces = template.generate(
                messages=[_with_reasoning(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
            for piece in pieces:
                blocks.append(piece)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise TemplateRefuses(str(error)) from error
        return "".join(blocks), spans

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateError as error:
            raise BadInput(
                got=f"a chat template that is not Jinja ({error})",
                allowed="a template as transformers reads it",
                fix="mend chat_template of tokenizer_config.json, or "
                "chat_template.jinja",
            ) from error


class _Speaking:
    """Where generation blocks begin and end in what is being rendered."""

    def __init__(self) -> None:
        self.begin([], [])

    def begin(self, blocks: list[str], spans: list[Span]) -> None:
        self._blocks, self._spans = blocks, spans

    def hear(self, said: str) -> None:
        start = sum(map(len, self._blocks))
        self._spans.append((start, start + len(said)))


class _Generation(jinja2.ext.Extension):
    """The block `{% generation %}` ... `{% endgeneration %}`."""

    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        environment.extend(speaking=_Speaking())

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_hear")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _hear(self, caller: Any) -> str:
        said = caller()
        speaking: Any = self.environment
        speaking.speaking.hear(said)
        return said


class _Dict:
    """What templates know as `dict`, without the attributes of a class."""

    def __call__(self, *given: Any, **named: Any) -> dict[Any, Any]:
        return dict(*given, **named)

    def fromkeys(self, *given: Any) -> dict[Any, Any]:
        return dict.fromkeys(*given)


class _Namespace(jinja2.utils.Namespace):
    """Without names that lead out of the sandbox."""

    def __init__(*given: Any, **named: Any) -> None:
        self, *rest = given  # so that a template may name something `self`
        for name in (found := dict(*rest, **named)):
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace with the name {name!r}")


def _environment() -> jinja2.Environment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    made.filters["tojson"] = _tojson
    made.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return made


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the escapes of HTML that Jinja's own has."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _with_reasoning(message: Message) -> dict[str, Any]:
    given = dict(message)
    found = [given[name] for name in _REASONING if given.get(name) is not None]
    if found:
        given = {"thinking": found[0], **given, "reasoning_content": found[0]}
    return given
