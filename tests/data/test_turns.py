# SPDX-License-Identifier: Apache-2.0
"""Which characters of a conversation are learnt, under templates of several forms."""

from typing import Any

import pytest

from hetjax.data.chat.sandbox import SandboxedTemplate, TemplateRefuses
from hetjax.data.chat.turns import Written, written
from hetjax.data.sources.rows import Conversation
from tests.data.chat_templates import ENDLESS, FORGETFUL, MARKED, PLAIN

SPECIAL = ("<|im_start|>", "<|im_end|>", "</s>")
EOS = {"eos_token": "</s>"}
_TYPE = {"type": "object", "properties": {"city": {"type": "string"}}}
_WEATHER = {"name": "weather", "description": "of a city", "parameters": _TYPE}
TOOLS: tuple[Any, ...] = ({"type": "function", "function": _WEATHER},)


def _asks(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _says(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def _call(**content: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"city": "Paris"}}
    calls = [{"type": "function", "function": function}]
    return {"role": "assistant", **content, "tool_calls": calls}


def _with_call(**content: Any) -> Conversation:
    told = {"role": "tool", "content": "20"}
    messages = (_asks("Weather?"), _call(**content), told, _says("It is 20."))
    return Conversation(messages, TOOLS)


CHATS = {
    "one": Conversation((_asks("a"), _says("b"))),
    "two": Conversation((_asks("a"), _says("b"), _asks("c"), _says(" d\n"))),
    "reasoned": Conversation((_asks("a"), _says("b", reasoning_content="why"))),
    "thought": Conversation((_asks("a"), _says("<think>why</think>b"))),
    "open": Conversation((_asks("a"), _says("b"), _asks("c"))),
    "empty": _with_call(content=""),
    "null": _with_call(content=None),
    "missing": _with_call(),
}


def learnt(found: list[Written]) -> list[str]:
    return [one.text[start:end] for one in found for start, end in one.spans]


def _written(source: str, chat: Conversation) -> list[Written]:
    return written(SandboxedTemplate(source, EOS), chat, SPECIAL)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("form", PLAIN)
def test_answers_are_those_of_the_template_with_generation_blocks(form, chat):
    found = _written(PLAIN[form], CHATS[chat])
    (marked,) = _written(MARKED[form], CHATS[chat])
    assert [one.text for one in found] == [marked.text]
    assert [one.rstrip() for one in learnt(found)] == [
        one.rstrip() for one in learnt([marked])
    ]
    assert not any(one.num_open for one in found)


def test_a_call_is_learnt_however_its_content_is_missing():
    expected = [
        '<call>{"name": "weather", "arguments": {"city": "Paris"}}</call><|im_end|>',
        "It is 20.<|im_end|>",
    ]
    for name in ("empty", "null", "missing"):
        assert learnt(_written(PLAIN["after_tool"], CHATS[name])) == expected
        assert learnt(_written(PLAIN["strings"], CHATS[name])) == [
            '<call>weather {"city": "Paris"}<|im_end|>',
            "It is 20.<|im_end|>",
        ]


def test_arguments_that_are_json_are_objects_for_the_template():
    function = {"name": "weather", "arguments": '{"city":"Paris"}'}
    call = _says("", tool_calls=[{"type": "function", "function": function}])
    chat = Conversation((_asks("Weather?"), call), TOOLS)
    assert learnt(_written(PLAIN["last_end"], chat)) == [
        '<call>{"name": "weather", "arguments": {"city": "Paris"}}</call><|im_end|></s>'
    ]


def test_an_answer_that_the_whole_text_has_otherwise_is_learnt_in_a_row_of_its_own():
    messages = (
        _asks("a"),
        _says("b", reasoning_content="why"),
        _asks("c"),
        _says("d", reasoning_content="so"),
    )
    found = _written(FORGETFUL, Conversation(messages))
    assert learnt(found) == ["why</think>b<|im_end|>", "so</think>d<|im_end|>"]
    first, last = (one.text for one in found)
    assert "why" in first and "c" not in first
    assert "why" not in last and last.endswith("<think>so</think>d<|im_end|>")


def test_an_answer_that_ends_by_the_next_header_is_learnt_with_it():
    found = _written(ENDLESS, CHATS["two"])
    assert learnt(found) == ["\nb<|im_start|>", "\n d\n<|im_start|>"]
    assert found[0].text.endswith("<|im_start|>assistant\n d\n<|im_start|>")
    assert found[0].num_open == 0


def test_an_answer_without_an_end_is_counted():
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    prompt = "{% if add_generation_prompt %}assistant: {% endif %}"
    (found,) = _written(source + prompt, CHATS["two"])
    assert learnt([found]) == ["b", "d"] or learnt([found]) == ["b", " d"]
    assert found.num_open == 2


@pytest.mark.parametrize("source", [PLAIN["last_end"], MARKED["last_end"]])
def test_an_answer_of_weight_zero_is_context_alone(source):
    whole = _written(source, CHATS["two"])
    for index, kept in (1, [1]), (3, [0]):
        messages = list(CHATS["two"].messages)
        messages[index] = {**messages[index], "weight": 0}
        found = _written(source, Conversation(tuple(messages)))
        assert [one.text for one in found] == [one.text for one in whole]
        assert learnt(found) == [learnt(whole)[number] for number in kept]


def test_tools_and_arguments_reach_the_template():
    source = "{{ tools[0].function.name }} {{ mode }} {{ messages[0].content }}"
    chat = Conversation((_asks("a"),), TOOLS, {"mode": "fast"})
    assert _written(source, chat)[0].text == "weather fast a"


def test_arguments_are_written_as_json_and_not_as_python_writes_them():
    source = (
        "{% for m in messages %}<|im_start|>{% for call in m.tool_calls or [] %}"
        "{{ call.function.name }} {{ call.function.arguments }}{% endfor %}"
        "{{ m.content }}{% endfor %}{{ '<|im_start|>' if add_generation_prompt }}"
    )
    assert learnt(_written(source, CHATS["empty"]))[0] == (
        'weather {"city": "Paris"}<|im_start|>'
    )


@pytest.mark.parametrize(
    ("source", "chat", "why"),
    [
        ("{{ messages | length }}", CHATS["one"], "cannot be found|does not follow"),
        (
            PLAIN["last_end"].replace("m.content or ''", "''"),
            CHATS["two"],
            "leaves out message 2",
        ),
        (
            MARKED["last_end"].replace("m.content or ''", "''"),
            CHATS["two"],
            "leaves out message 2",
        ),
        (
            PLAIN["thought"].replace("call.function", "1"),
            CHATS["null"],
            "leaves out the call",
        ),
        (
            PLAIN["thought"],
            Conversation((_says("a"),), (), {"messages": []}),
            "'messages'",
        ),
    ],
)
def test_what_would_be_learnt_otherwise_is_refused(source, chat, why):
    with pytest.raises(TemplateRefuses, match=why):
        _written(source, chat)
