# SPDX-License-Identifier: Apache-2.0
"""Messages: a receiver reads exactly what the sender wrote."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.rpc.encoding import VERSION, BadMessage, decode, encode, kinds
from hetjax.runtime.rpc.message import answer_of
from hetjax.runtime.rpc.schema import (
    Abort,
    Done,
    FinishStep,
    Json,
    Message,
    Request,
    Train,
)
from hetjax.runtime.worker import service

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda below: st.lists(below) | st.dictionaries(st.text(), below),
    max_leaves=5,
)
WRONG = (None, True, 1, 1.5, "text", [], {}, [None], {"a": None}, [[0]], ["a", "b", 3])


def of(hint: Any) -> st.SearchStrategy[Any]:
    """Return values of a type hint, as they are after their arrival."""
    kind, parts = get_origin(hint), get_args(hint)
    if hint == Json:
        return st.dictionaries(st.text(), JSON)
    if kind in (Union, UnionType):
        return st.one_of([*map(of, parts)])
    if is_dataclass(hint):
        fields = {name: of(found) for name, found in get_type_hints(hint).items()}
        return st.builds(hint, **fields)  # pyright: ignore
    if kind is tuple:
        return st.tuples(*map(of, parts))
    if kind is Sequence:
        return st.lists(of(parts[0]), max_size=3).map(tuple)
    if kind is Mapping:
        return st.dictionaries(of(parts[0]), of(parts[1]), max_size=3)
    if hint is float:
        return st.floats(allow_nan=False)
    return st.from_type(hint)


MESSAGES = st.sampled_from(sorted(kinds())).flatmap(lambda name: of(kinds()[name]))


def frame(message: Message) -> dict[str, Any]:
    return json.loads(encode(message).tobytes())


def read(found: Any) -> Message:
    return decode(np.frombuffer(json.dumps(found).encode(), np.uint8), Message)


def test_every_class_is_known_and_every_request_has_an_answer_and_somebody_to_do_it():
    assert len(kinds()) == 62
    requests = {k for k in kinds().values() if issubclass(k, Request)}
    assert all(issubclass(answer_of(kind), Message) for kind in requests)
    assert requests == service.HANDLERS.keys() | {Abort}


@pytest.mark.parametrize("name", sorted(kinds()))
def test_a_message_that_arrives_is_the_one_that_was_sent(name: str):
    @given(of(kinds()[name]))
    def check(message: Message) -> None:
        found = decode(encode(message), type(message))
        assert found == message and type(found) is type(message)

    check()


def test_the_norm_of_a_step_that_went_wrong_arrives_as_it_is():
    for squares in (float("nan"), float("inf")):
        sent = FinishStep(commit=StepCommit(squares=squares, losses=(), num_tokens=1))
        found = decode(encode(sent), FinishStep).commit.squares
        assert str(found) == str(squares)


def same(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal, with 1, 1.0 and true distinct."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@given(MESSAGES, st.data())
def test_a_field_that_is_missing_unknown_or_renamed_is_refused(
    message: Message, data: st.DataObject
):
    found = frame(message)
    name = data.draw(st.sampled_from(sorted(found["fields"])))
    value = found["fields"].pop(name)
    with pytest.raises(BadMessage, match=f"{type(message).__name__} lacks {name!r}"):
        read(found)
    found["fields"][f"{name}_"] = value
    with pytest.raises(BadMessage, match="lacks|has"):
        read(found)
    found["fields"][name] = value
    with pytest.raises(BadMessage, match=f"{type(message).__name__} has '{name}_'"):
        read(found)


@given(MESSAGES, st.data())
def test_a_field_of_another_type_is_refused_or_is_one_that_may_be_so(
    message: Message, data: st.DataObject
):
    """An accepted value is always the one that its sender would have written."""
    found = frame(message)
    name = data.draw(st.sampled_from(sorted(found["fields"])))
    wrong = data.draw(st.sampled_from(WRONG))
    found["fields"][name] = wrong
    try:
        back = frame(read(found))["fields"][name]
    except BadMessage as refused:
        assert f"{type(message).__name__}.{name}" in str(refused)
    else:
        assert same(back, wrong) or (wrong == 1 and same(back, 1.0))


@pytest.mark.parametrize(
    "wrong", [True, 1.0, "1", None, [1], {}], ids=lambda wrong: repr(wrong)
)
def test_what_is_not_a_whole_number_is_no_step(wrong: object):
    found = frame(Train(step=1, turn=2, traced=False))
    found["fields"]["step"] = wrong
    with pytest.raises(
        BadMessage, match=r"Train\.step = .* is not of type <class 'int'>"
    ):
        read(found)


@pytest.mark.parametrize(
    "change",
    [
        {"version": VERSION + 1},
        {"version": None},
        {"message": "Destroy"},
        {"message": "Message"},
        {"message": "Request"},
        {"message": ["Done"]},
        {"fields": []},
        {"fields": None},
        {"more": 1},
    ],
    ids=repr,
)
def test_a_frame_of_another_form_is_refused(change: dict[str, Any]):
    assert read(frame(Done())) == Done()
    with pytest.raises(BadMessage):
        read(frame(Done()) | change)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"7", b"\xff", b"[" * 100_000])
def test_what_is_no_frame_at_all_is_refused(text: bytes):
    with pytest.raises(BadMessage):
        decode(np.frombuffer(text, np.uint8), Message)


def test_an_answer_is_no_request():
    with pytest.raises(BadMessage, match="'Done' is not a known request"):
        decode(encode(Done()), Request)


@given(st.binary(max_size=64), st.data())
def test_bytes_that_were_changed_on_the_way_are_refused_or_are_a_message(
    noise: bytes, data: st.DataObject
):
    text = encode(data.draw(MESSAGES)).tobytes()
    at = data.draw(st.integers(0, len(text)))
    hurt = text[:at] + noise + text[at + len(noise) :]
    try:
        found = decode(np.frombuffer(hurt, np.uint8), Message)
    except BadMessage:
        return
    assert isinstance(found, Message) and decode(encode(found), Message) is not None
