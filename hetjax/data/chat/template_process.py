# SPDX-License-Identifier: Apache-2.0
"""A process that renders one chat template within limits.

Reads lines of JSON, first the template, then requests, and answers each with one or
several lines. Owns the limits of this process: 1 GiB of memory, a few seconds of CPU
time for a text, and the length of texts. A text that needs more memory or is too long
is refused; one that takes more time ends the process, which its parent sees. Started by
`chat_template.py`; not meant to be typed.
"""

import json
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import ceil
from typing import Any

from hetjax.data.chat.sandbox import (
    SandboxedTemplate,
    TemplateIsBroken,
    TemplateRefuses,
)
from hetjax.data.chat.turns import written
from hetjax.data.sources.rows import Conversation

MEMORY_BYTES = 1 << 30
RENDER_S = 2  # of CPU time, for a text; the system counts whole seconds
# A request's texts may have so many characters, plus _CHARS_PER_CHAR for each of its
# own characters
_CHARS = 10_000_000
_CHARS_PER_CHAR = 8


def main() -> None:
    """Answer standard input line by line."""
    with suppress(ValueError, OSError):  # a lower limit that is already set holds
        _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    source, special_tokens, special = json.loads(sys.stdin.buffer.readline())
    try:
        template = SandboxedTemplate(
            source, special_tokens, before_render=_give_seconds
        )
    except TemplateIsBroken as error:
        _answer({"broken": str(error)})
        return
    _answer({})
    for line in sys.stdin.buffer:
        template.most_chars = _CHARS + _CHARS_PER_CHAR * len(line)
        for answer in _answers(template, json.loads(line), special):
            _answer(answer)


def _answers(
    template: SandboxedTemplate, request: Mapping[str, Any], special: list[str]
) -> Iterator[dict[str, Any]]:
    for chat in request.get("chats", ()):
        yield _guarded(lambda chat=chat: _written(template, chat, special))
    if "messages" in request:
        yield _guarded(lambda: _rendered(template, request))


def _guarded(answer: Any) -> dict[str, Any]:
    try:
        return answer()
    except TemplateRefuses as refused:
        return {"refused": str(refused)}
    except MemoryError:
        return {"refused": "it needs too much memory"}


def _written(
    template: SandboxedTemplate, given: Mapping[str, Any], special: list[str]
) -> dict[str, Any]:
    chat = Conversation(
        tuple(given["messages"]), tuple(given["tools"]), given["template_arguments"]
    )
    texts = written(template, chat, special)
    num_chars = sum(len(one.text) for one in texts)
    if num_chars > template.most_chars:
        raise TemplateRefuses(f"it writes {num_chars} characters")
    template.most_chars -= num_chars
    return {"written": [[one.text, one.spans, one.num_open] for one in texts]}


def _rendered(
    template: SandboxedTemplate, request: Mapping[str, Any]
) -> dict[str, Any]:
    messages, prompt = request["messages"], request["prompt"]
    return {"text": template.render(messages, add_generation_prompt=prompt)[0]}


def _answer(answer: Mapping[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def _give_seconds() -> None:
    """Give the next text its CPU time, whatever the texts before it took."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    with suppress(ValueError, OSError):
        _limit(resource.RLIMIT_CPU, ceil(used.ru_utime + used.ru_stime) + RENDER_S)


def _limit(which: int, most: int) -> None:
    """Set the soft limit; it can be raised again, as the hard limit stays."""
    resource.setrlimit(which, (most, resource.getrlimit(which)[1]))


if __name__ == "__main__":
    main()
