# SPDX-License-Identifier: Apache-2.0
"""Renders chat templates: a conversation as the text that a model was trained to read.

Templates are programs, and come with models from any source. So each is rendered in a
separate process with limits of time and memory (`template_process.py`). The process is
started once and ends with its template. Owns that process. Does not own the sandbox
(`sandbox.py`), where the assistant speaks (`turns.py`), the files of templates
(`hugging_face.py`) nor tokens (`conversations.py`).
"""

import json
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from threading import Lock
from typing import Any, BinaryIO, cast

from hetjax.data.chat.sandbox import TemplateRefuses
from hetjax.data.chat.turns import Written
from hetjax.data.sources.messages import REASONING, Message
from hetjax.data.sources.rows import Conversation
from hetjax.errors import BadInput

_MOST_ANSWER_BYTES = 1 << 30


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template over `messages`, with the names of special tokens.

    `special` are all special tokens of the tokenizer; one of them ends an answer.
    """

    source: str
    special_tokens: Mapping[str, str]
    special: tuple[str, ...] = ()

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> str:
        """Return the text. Raises TemplateRefuses with the template's objection.

        Raises BadInput for a template that is broken, or goes beyond its limits.
        """
        request = {"messages": [*messages], "prompt": add_generation_prompt}
        (answer,) = self._process.answers(request, 1)
        if "refused" in answer:
            raise TemplateRefuses(answer["refused"])
        return answer["text"]

    def written(
        self, chats: Sequence[Conversation]
    ) -> list[list[Written] | TemplateRefuses]:
        """Return for each conversation the texts that teach it, or why there are none.

        Raises BadInput for a template that is broken, or goes beyond its limits.
        """
        request = {"chats": [asdict(chat) for chat in chats]}
        return [*map(_written, self._process.answers(request, len(chats)))]

    def reads(self, name: str) -> bool:
        """Whether the template mentions this name of a field or a variable."""
        names = REASONING if name in REASONING else (name,)
        return any(re.search(rf"\b{re.escape(n)}\b", self.source) for n in names)

    @cached_property
    def _process(self) -> "_Process":
        about = [self.source, dict(self.special_tokens), list(self.special)]
        process = _Process(json.dumps(about))
        weakref.finalize(self, process.end)
        return process


def _written(answer: Mapping[str, Any]) -> list[Written] | TemplateRefuses:
    if "refused" in answer:
        return TemplateRefuses(answer["refused"])
    return [
        Written(text, [(start, end) for start, end in spans], num_open)
        for text, spans, num_open in answer["written"]
    ]


class _Process:
    """The process that renders a template; a new one starts if it has died."""

    def __init__(self, about: str) -> None:
        self._about, self._lock = about, Lock()
        self._running: subprocess.Popen[bytes] | None = None

    def answers(self, request: Mapping[str, Any], count: int) -> list[Any]:
        """Send a request, and wait for `count` answers."""
        with self._lock:
            if self._running is None:
                self._running = _started()
                self._ask(self._about, 1)
            return self._ask(json.dumps(request, default=str), count)

    def end(self) -> None:
        """End the process, even if it has already exited."""
        running, self._running = self._running, None
        if running is not None:
            running.kill()
            running.wait()
            for pipe in running.stdin, running.stdout:
                with suppress(OSError):  # unwritten data has no reader any more
                    cast(BinaryIO, pipe).close()

    def _ask(self, request: str, count: int) -> list[Any]:
        try:
            answers = [*self._answers(request, count)]
        except BaseException:  # Ctrl-C in the middle of an answer, too
            self.end()
            raise
        if "broken" in answers[0]:
            self.end()
            raise _broken(answers[0]["broken"])
        return answers

    def _answers(self, request: str, count: int) -> Iterator[Any]:
        running = self._running
        assert running is not None
        asked = cast(BinaryIO, running.stdin)
        output = cast(BinaryIO, running.stdout)
        with suppress(BrokenPipeError):
            asked.write(request.encode() + b"\n")
            asked.flush()
        for number in range(count):
            line = output.readline(_MOST_ANSWER_BYTES)
            if not line.endswith(b"\n"):
                raise _died(running, number)
            yield json.loads(line)


def _started() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "hetjax.data.chat.template_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the run alone
    )


def _died(running: subprocess.Popen[bytes], number: int) -> BadInput:
    running.kill()
    code = running.wait()
    how = f"ended with code {code}"
    if code == -signal.SIGXCPU:
        how = "exceeded the time limit for a text"
    elif code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    return BadInput(
        got=f"a chat template that {how}, at conversation {number + 1} of a group",
        allowed="a template that writes a conversation in a few seconds and 1 GiB",
        fix="correct chat_template in tokenizer_config.json, or chat_template.jinja",
    )


def _broken(what: str) -> BadInput:
    return BadInput(
        got=f"a chat template that cannot be compiled ({what})",
        allowed="a template that transformers can read",
        fix="correct chat_template in tokenizer_config.json, or chat_template.jinja",
    )
