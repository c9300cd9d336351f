# SPDX-License-Identifier: Apache-2.0
"""Records in common forms: what each form is read as, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from hetjax.data.sources.forms import KNOWN, FormsSeen
from hetjax.data.sources.messages import is_learnt
from hetjax.data.sources.readers import recognised, rows
from hetjax.data.sources.rows import Completion, Conversation, canonical, row_of
from hetjax.errors import BadInput

USER, ANSWER = (
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
)
CHAT = [USER, ANSWER]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
SHAREGPT = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]


def _row(record: Any, column: str = "text", **given: Any) -> Any:
    return row_of(record, column, "here", **given)


def _got(record: Any, column: str = "text", **given: Any) -> str:
    with pytest.raises(BadInput) as caught:
        _row(record, column, **given)
    return caught.value.got


@pytest.mark.parametrize(
    "record",
    [
        {"messages": CHAT},
        {"messages": json.dumps(CHAT)},
        {"text": json.dumps(CHAT)},
        {"text": json.dumps(SHAREGPT, indent=1)},
        {"conversations": SHAREGPT},
        {"conversations": json.dumps(SHAREGPT)},
        {"conversation": CHAT},
        {"instruction": "2+2?", "output": "4"},
        {"instruction": "2+2?", "input": "", "output": "4"},
        {"prompt": "2+2?", "response": "4"},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "2+"}, "2?"]}
            ]
        }
        | {"x": 1},
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": json.dumps([USER]), "completion": json.dumps([ANSWER])},
        {"prompt": [USER], "completion": "4"},
        {"messages": CHAT, "prompt": "2+2?", "tools": None, "images": [], "weight": 1},
    ],
    ids=str,
)
def test_a_conversation_is_one_however_it_is_written(record):
    found = _row(record)
    assert isinstance(found, Conversation)
    assert found.messages == tuple(CHAT)[: len(found.messages)]
    if "x" not in record:
        assert canonical(found) == canonical(Conversation(tuple(CHAT)))


def test_alpacas_input_history_and_system_are_part_of_the_conversation():
    record = {"instruction": "Add.", "input": "2 and 3", "output": "5"}
    more = {"system": "Be brief.", "history": [["Hi", "Hello"]]}
    texts = [(m["role"], m["content"]) for m in _row(record | more).messages]
    assert texts == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Add.\n2 and 3"),
        ("assistant", "5"),
    ]


def test_sharegpt_calls_and_observations_are_calls_and_tools():
    call = json.dumps(CALL["function"])
    told = [
        {"from": "function_call", "value": call},
        {"from": "observation", "value": "5"},
    ]
    found = _row({"conversations": [*SHAREGPT, *told], "tools": json.dumps([TOOL])})
    assert found.tools == (TOOL,)
    assert found.messages[2:] == (
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "5"},
    )


def test_what_the_template_is_given_makes_another_row():
    plain = _row({"messages": CHAT})
    tools = _row({"messages": CHAT, "tools": [TOOL]})
    kwargs = _row(
        {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}}
    )
    assert tools.tools == (TOOL,)
    assert kwargs.template_arguments == {"enable_thinking": False}
    assert len({canonical(row) for row in (plain, tools, kwargs)}) == 3
    as_before = json.dumps(CHAT, ensure_ascii=False, sort_keys=True)
    assert canonical(plain) == as_before


def test_answers_of_weight_zero_and_of_a_prompt_are_not_learnt():
    quiet = ({**ANSWER, "weight": 0}, {**ANSWER, "train": False})
    for message in quiet:
        (_, found) = _row({"messages": [USER, message]}).messages
        assert not is_learnt(found)
    for message in (ANSWER, {**ANSWER, "weight": 1}, {**ANSWER, "train": True}):
        (_, found) = _row({"messages": [USER, message]}).messages
        assert is_learnt(found)
    row = _row({"prompt": [*CHAT, USER], "completion": [ANSWER]})
    assert [is_learnt(m) for m in row.messages] == [False, False, False, True]


@pytest.mark.parametrize(
    ("record", "got"),
    [
        (
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]},
            "preference row",
        ),
        ({"messages": CHAT, "chosen": "a", "rejected": "b"}, "preference row"),
        ({"prompt": "a", "completion": "b", "label": True}, "preference row"),
        ({"messages": CHAT, "images": ["a.png"]}, "'images' beside its messages"),
        ({"messages": CHAT, "functions": [{}]}, "'functions', an older form"),
        ({"messages": CHAT, "weight": 0}, "'0' in 'weight' beside its messages"),
        ({"messages": CHAT, "tools": "{}"}, "'tools' that is not a JSON list"),
        ({"messages": CHAT, "tools": [1]}, "no list of objects in 'tools'"),
        ({"messages": CHAT, "chat_template_kwargs": 1}, "no object in 'chat_templ"),
        (
            {"messages": "[{'role': 'user'}]"},
            "not a JSON list but a Python one; json.dumps writes",
        ),
        ({"messages": "Hello"}, "'messages' that is not a JSON list"),
        (
            {"messages": [*CHAT, {**USER, "weight": 1}]},
            "'user', but is marked to be learnt",
        ),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "has the weight '0.5'"),
        ({"messages": [USER, {**ANSWER, "train": "no"}]}, "has 'no' in 'train'"),
        ({"messages": [USER, {"role": "assistant"}]}, "message 2 has no content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "a part of type 'image_url' in its content",
        ),
        ({"conversations": [{"from": "narrator", "value": "a"}]}, "is from 'narrator'"),
        ({"conversations": [{"from": "gpt"}]}, "has no value"),
        ({"instruction": "a", "output": " "}, "has an empty output"),
        ({"instruction": "a", "output": 4}, "holds a number in 'output', not a string"),
        (
            {"messages": [{"role": "system", "content": "a"}], "system": "b"},
            "different",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_learnt_as_it_says_is_refused_by_name(record, got):
    assert got in _got(record)


def test_a_format_that_is_asked_for_goes_before_what_fields_say():
    text = json.dumps(CHAT)
    assert _row({"text": text}, format="text") == text
    chosen = {"messages": CHAT, "chosen": CHAT, "rejected": CHAT}
    assert _row(chosen, format="messages") == Conversation(tuple(CHAT))
    assert _row({"text": "a", "body": SHAREGPT}, "body", format="sharegpt") == (
        Conversation(tuple(CHAT))
    )
    pair = {"prompt": "2+2?", "response": "4"}
    assert _row(pair, format="completion") == Completion("2+2?", "4")
    assert _row({"prompt": "2+2?", "completion": "4"}, format="alpaca") == (
        Conversation(tuple(CHAT))
    )
    assert "not the fields of the format sharegpt" in _got(pair, format="sharegpt")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_each_field_is_used_or_named_once_as_not_used(tmp_path: Path, suffix: str):
    """Any field beside a row's messages: there is no third outcome."""
    others = sorted({*KNOWN, "id", "source"} - {"messages"})
    for name in others:
        record = {"messages": CHAT, name: "0"}
        path = tmp_path / f"a.{suffix}"
        _write(path, [record, record])
        seen = FormsSeen()
        try:
            found = list(rows(path, "text", seen=seen))
        except BadInput as refused:
            assert repr(name) in refused.got
            continue
        is_used = canonical(found[0]) != canonical(Conversation(tuple(CHAT)))
        assert is_used or [*seen.unused] == [name]
        assert not (is_used and seen.unused)


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, records)))
        return
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(records)
    pytest.importorskip("pyarrow.parquet").write_table(table, path)


def test_the_log_says_what_was_recognised_with_an_example(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    _write(path, [{"messages": CHAT, "id": 1, "source": "x"}] * 2)
    seen = FormsSeen()
    list(rows(path, "text", seen=seen))
    assert recognised(seen) == [
        "rows: messages in 'messages'; the first: user '2+2?', assistant '4'",
        "rows: not used: 'id', 'source'",
    ]


def test_nulls_that_parquet_puts_beside_other_rows_fields_are_none(tmp_path: Path):
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    other = {"name": "sub", "arguments": {"b": 1}}
    more = {**calls, "tool_calls": [{"type": "function", "function": other}]}
    chats = [[USER, calls], [USER, more], CHAT]
    path = tmp_path / "a.parquet"
    _write(path, [{"messages": chat} for chat in chats])
    found = [row.messages for row in rows(path, "text")]  # pyright: ignore
    assert found == [tuple(chat) for chat in chats]
