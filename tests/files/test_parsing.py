# SPDX-License-Identifier: Apache-2.0
"""JSON and TOML with limits, against the libraries without limits."""

import json
import math
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.files.parsing import (
    MOST_DEPTH,
    Malformed,
    json_value,
    toml_table,
)

_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(alphabet="ab\"\\[]{},#\n'é"),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a"[{'), inner),
    max_leaves=60,
)


@given(_VALUES)
def test_json_is_read_as_the_library_reads_it(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert json_value(text) == json.loads(text) == value


@pytest.mark.parametrize(
    "deep",
    [
        "[" * 200_000,
        "[" * 200_000 + "]" * 200_000,
        '{"a":' * 200_000,
        '"\\"", ' + "[" * 200_000,
        "[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1),
    ],
    ids=range(5),
)
def test_deep_json_is_refused_before_it_is_parsed(
    deep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(*_: object, **__: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(json.JSONDecoder, "decode", parse)
    with pytest.raises(Malformed, match=f"nested deeper than {MOST_DEPTH}"):
        json_value(deep)


def test_json_of_the_greatest_depth_is_read() -> None:
    text = "[" * MOST_DEPTH + "]" * MOST_DEPTH
    assert json_value(text) == json.loads(text)
    flat = "[" + ",".join(["[[]]", '"[[["', '"\\"[["'] * 500) + "]"
    assert json_value(flat) == json.loads(flat)


@pytest.mark.parametrize(
    "deep",
    [
        "a = " + "[" * 100_000,
        "a = " + "{a = " * 100_000,
        'a = """x"""", ' + "[" * 100_000,
        "a = '''x'''\nb = " + "[" * 100_000,
        '# """\na = \'"\'\nb = ' + "[" * 100_000,
        ".".join("a" * 20_000) + " = 1",
        f"[{'.'.join('a' * 20_000)}]",
        f"""a = {{{" . ".join(["'a'"] * 20_000)} = 1}}""",
    ],
    ids=range(8),
)
def test_deep_toml_is_refused(deep: str) -> None:
    with pytest.raises(Malformed):
        toml_table(deep)


@pytest.mark.parametrize(
    "text",
    [
        'a = "[[["\nb = [' + "[1], " * 100 + "]",
        "a = '''\n[[[ ' '' [[[\n'''\nb = [" + "[1], " * 100 + "]",
        'a = """\n[[[ " "" \\""" [[[\n"""\nb = [' + "[1], " * 100 + "]",
        "# [[[[ \" ' \n" * 100 + "b = [" + "[1], " * 100 + "]",
        "[[node]]\nname = 'x'\n" * 200,
        "a.b.c = [" + "1.5, " * 100 + "]\n" + "[a.d]\nx = 0.5\n",
        "".join(f"a.b{n}.c = 1.5\n" for n in range(100)),
    ],
    ids=range(7),
)
def test_brackets_in_strings_and_comments_are_not_counted(text: str) -> None:
    assert toml_table(text) == tomllib.loads(text)


@pytest.mark.parametrize(
    "text",
    ["NaN", "[Infinity]", "-Infinity", "1e400", "-1e999", "1" * 301, "[1e309]"],
)
def test_numbers_without_a_value_are_refused(text: str) -> None:
    with pytest.raises(Malformed):
        json_value(text)


def test_nan_is_read_where_it_is_asked_for() -> None:
    assert math.isnan(json_value("NaN", finite=False))
    with pytest.raises(Malformed):
        json_value("1" * 301, finite=False)


def test_a_whole_number_of_a_tokenizer_is_read() -> None:
    assert json_value("1000000000000000019884624838656") == int(1e30)


def test_repeated_keys_are_named() -> None:
    with pytest.raises(Malformed, match="key 'a' 2 times in one object"):
        json_value('[{"b": 1, "a": 1, "a": 1}]')
    assert json_value('[{"a": 1}, {"a": 2}]') == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("text", [r'"\ud800"', r'{"\uDC00": 1}', r'[["a", "\ud83d"]]'])
def test_half_a_character_is_refused(text: str) -> None:
    with pytest.raises(Malformed, match="surrogate"):
        json_value(text)


def test_a_pair_of_halves_is_a_character() -> None:
    assert json_value(r'["\ud83d\ude00", {"a": 1}]') == ["😀", {"a": 1}]


@pytest.mark.parametrize("one", ["0", "{}", "[1]", '"a"', "[[]]"])
def test_more_values_than_memory_has_room_for_are_refused(
    one: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetjax.files.parsing.MOST_VALUES", 1_000)
    assert len(json_value("[" + ",".join([one] * 300) + "]")) == 300
    with pytest.raises(Malformed, match="more than 1,000 values"):
        json_value("[" + ",".join([one] * 1_200) + "]")
