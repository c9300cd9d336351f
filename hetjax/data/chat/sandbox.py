# SPDX-License-Identifier: Apache-2.0
"""Renders one chat template in Jinja's sandbox, as `transformers` does.

Owns the names that templates find there, and generation blocks. Does not own limits of
time and memory (`template_process.py`) nor where the assistant speaks (`turns.py`).
Templates from other people must be rendered in a separate process
(`chat_template.py`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hetjax.data.sources.messages import LEARNT_FIELDS, REASONING, Message

Span = tuple[int, int]  # characters of the rendered text, the end excluded

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_OWN_NAMES = {"messages", "documents", "add_generation_prompt"}  # no row may set them


class TemplateRefuses(Exception):
    """The template cannot write these messages, or its text does not show the turns."""


class TemplateIsBroken(Exception):
    """The template is not valid Jinja."""


class SandboxedTemplate:
    """A compiled template, with the names of special tokens.

    `before_render` is called before it is compiled and before each rendering. A text of
    more than `most_chars` is refused.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        before_render: Callable[[], None] = lambda: None,
    ) -> None:
        self.has_blocks = _GENERATION.search(source) is not None
        self.special_tokens = special_tokens
        self.most_chars = 1 << 62
        self._before_render = before_render
        try:
            before_render()
            self._compiled = _environment().from_string(source)
        except Exception as error:  # the compiler also evaluates constants
            raise TemplateIsBroken(_said(error)) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Any] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """Return the text, and its generation blocks.

        Raises TemplateRefuses with the template's objection to the messages.
        """
        given = {**self.special_tokens, **(arguments or {})}
        if odd := _OWN_NAMES & {*(arguments or ())}:
            raise TemplateRefuses(f"a row may not set {min(odd)!r}")
        tracker: Any = self._compiled.environment
        blocks: list[str] = []
        spans: list[Span] = []
        tracker.speaking.begin(blocks, spans)
        self._before_render()
        try:
            pieces = self._compiled.generate(
                **{
                    **given,
                    "messages": [_for_template(message) for message in messages],
                    "tools": [*tools] or None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
            num_chars = 0
            for piece in pieces:
                num_chars += len(piece)
                if num_chars > self.most_chars:
                    raise TemplateRefuses(f"it writes more than {num_chars} characters")
                blocks.append(piece)
        except TemplateRefuses:
            raise
        except Exception as error:  # a template can raise any error
            raise TemplateRefuses(_said(error)) from error
        return "".join(blocks), spans


def _said(error: Exception) -> str:
    """Return what went wrong in the template, in one line."""
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    if isinstance(error, RecursionError):
        return "it calls itself without end"
    what = " ".join(str(error).split())[:200]
    return (
        what
        if isinstance(error, jinja2.TemplateError)
        else (f"{type(error).__name__}: {what}")
    )


class _Speaking:
    """Records where generation blocks begin and end in the text being rendered."""

    def __init__(self) -> None:
        self.begin([], [])

    def begin(self, blocks: list[str], spans: list[Span]) -> None:
        self._blocks, self._spans = blocks, spans

    def add_span(self, said: str) -> None:
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
        call = self.call_method("_record")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _record(self, caller: Any) -> str:
        said = caller()
        speaking: Any = self.environment
        speaking.speaking.add_span(said)
        return said


class _Dict:
    """The `dict` of templates, without the attributes of a class."""

    def __call__(self, *given: Any, **named: Any) -> dict[Any, Any]:
        return dict(*given, **named)

    def fromkeys(self, *given: Any) -> dict[Any, Any]:
        return dict.fromkeys(*given)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without names that lead out of the sandbox."""

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
    """Return JSON without the HTML escapes of Jinja's own filter."""
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


def _for_template(message: Message) -> dict[str, Any]:
    """Return a message with its reasoning under the names that templates read."""
    given = {k: v for k, v in message.items() if k not in LEARNT_FIELDS}
    found = [given[name] for name in REASONING if given.get(name) is not None]
    if found:
        given = {"thinking": found[0], **given, "reasoning_content": found[0]}
    return given
