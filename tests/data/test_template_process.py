# SPDX-License-Identifier: Apache-2.0
"""Untrusted chat templates: whatever they compute ends in one error."""

import json
import resource
import shutil
from pathlib import Path

import pytest

from hetjax.data.chat import template_process
from hetjax.data.chat.chat_template import ChatTemplate
from hetjax.data.chat.conversations import RowEncoder
from hetjax.data.chat.sandbox import TemplateRefuses
from hetjax.data.hugging_face import read_tokenizer
from hetjax.data.sources.rows import Conversation
from hetjax.errors import BadInput
from tests.against_transformers.tokenizer_cases import FOLDER

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = Conversation((*MESSAGES, {"role": "assistant", "content": "ho"}))
_DOUBLED = (
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}"
)
_NESTED = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content / 2 }}", "unsupported operand"),
        ("{{ messages | sum }}", "unsupported operand"),
        ("{{ '%d' % 'a' }}", "TypeError"),
        ("{{ 'a'.encode('ascii').decode('utf-16') }}", "UnicodeDecodeError"),
        ("{{ messages[0].content.split('') }}", "empty separator"),
        ("{{ [1][5:1:0] }}", "slice step"),
        (_DOUBLED, "too much memory"),
        ("{{ 'x' * 9999999999 }}", "too much memory"),
        ("{{ (['x' * 9999999] * 999) | join }}", "too much memory"),
        ("{{ ('x' * 9999999) ~ 1 / 0 }}", "division by zero"),
        ("{{ '%9999999999d' % 1 }}", "too much memory"),
        ("{{ 'ab'.center(9999999999) }}", "too much memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "without end"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "more than"),
        ("{{ '{% for' }}{% include 'a' %}", "no loader"),
    ],
)
def test_a_template_that_raises_refuses_the_messages(source, why):
    template = ChatTemplate(source, {})
    try:
        with pytest.raises(TemplateRefuses, match=why):
            template.render(MESSAGES)
    except BadInput as refused:
        while_compiled = "cannot be compiled" in refused.got
        # a slow machine may need the whole time limit to fill the memory
        too_slow = why == "too much memory" and "time limit" in refused.got
        assert while_compiled or too_slow


@pytest.mark.parametrize(
    "source",
    [
        _NESTED,
        "{% for i in range(99999) %}{% set x = range(99999) | sum %}{% endfor %}",
        "{{ (7 ** 99999) ** 9999 }}",
    ],
)
def test_a_template_without_end_is_ended(source):
    template = ChatTemplate(source, {})
    with pytest.raises(BadInput) as caught:
        template.written([CHAT, CHAT])
    assert caught.value.got.startswith("a chat template that exceeded the time limit")


def test_the_process_has_limits_whose_hard_ones_stay():
    """The process has its limits, and the tests' process keeps its own."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    source = "{{ 1 }}"
    template = ChatTemplate(source, {})
    assert template.render(MESSAGES) == "1"
    running = template._process._running
    assert running is not None
    lines = Path(f"/proc/{running.pid}/limits").read_text().splitlines()
    limits = {line[:26].strip(): line[26:].split() for line in lines}
    assert limits["Max address space"][0] == str(template_process.MEMORY_BYTES)
    assert int(limits["Max cpu time"][0]) <= 60
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_a_process_serves_many_and_ends_with_its_template():
    template = ChatTemplate("{{ messages[0].content }}{{ 1 / messages | length }}", {})
    assert [template.render(MESSAGES) for _ in range(3)] == ["hi1.0"] * 3
    running = template._process._running
    assert running is not None and running.poll() is None
    with pytest.raises(TemplateRefuses):
        template.render([])  # and the process stays usable
    assert template.render(MESSAGES) == "hi1.0" and running.poll() is None
    del template
    assert running.returncode is not None


def test_a_template_that_is_no_jinja_is_refused_as_such():
    with pytest.raises(BadInput, match="cannot be compiled .unexpected"):
        ChatTemplate("{% for", {}).render(MESSAGES)
    with pytest.raises(BadInput, match="cannot be compiled"):
        ChatTemplate("{{ [" * 3_000, {}).render(MESSAGES)


def test_a_row_that_a_template_cannot_write_is_named():
    ids = read_tokenizer(FOLDER / "chatml").ids
    encoder = RowEncoder(ids, ChatTemplate("{{ 1 / 0 }}", {}))
    with pytest.raises(BadInput) as caught:
        list(encoder.encoded([CHAT]))
    assert "refuses: ZeroDivisionError: division by zero" in caught.value.got
    assert "ho" in caught.value.fix


def _broken_tokenizer(folder: Path, change: str) -> Path:
    shutil.copytree(FOLDER / "chatml", folder)
    path = folder / "tokenizer.json"
    made = json.loads(path.read_text())
    if change == "charsmap":
        made["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    elif change == "unknown":
        made["model"] = {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 7}
    else:
        made["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        }
    path.write_text(json.dumps(made))
    return folder


@pytest.mark.parametrize("change", ["charsmap", "unknown", "processor"])
def test_a_tokenizer_that_fails_is_bad_input(tmp_path: Path, change: str):
    folder = _broken_tokenizer(tmp_path / "broken", change)
    with pytest.raises(BadInput):
        read = read_tokenizer(folder)
        list(read.ids.encode("b\u00e9"))
        read.ids.encode_documents(["b\u00e9", "c"])
        raise AssertionError("it encodes")
