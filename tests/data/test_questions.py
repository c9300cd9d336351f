# SPDX-License-Identifier: Apache-2.0
"""Rows of multiple-choice questions, and messages about rows that are none."""

from pathlib import Path

import pytest

from hetjax.data.sources.questions import Question, read_questions
from hetjax.errors import BadInput


def test_both_pairs_of_names_are_read_and_others_are_left(tmp_path: Path):
    path = tmp_path / "some.jsonl"
    path.write_text(
        '{"context": "one", "choices": ["a", "b"], "gold": 1, "id": 7}\n\n'
        '{"query": "two", "choices": ["c", "d", "é"], "answer": 2}\n'
    )
    assert read_questions(path) == [
        Question(context="one", choices=("a", "b"), gold=1),
        Question(context="two", choices=("c", "d", "é"), gold=2),
    ]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("{", "is not JSON"),
        ("[1]", "is a list"),
        ('{"context": "a", "gold": 0}', "no 'choices' .its fields: 'context', 'gold'"),
        ('{"question": "a", "choices": ["a", "b"], "gold": 0}', "no 'context' or"),
        ('{"context": "a", "choices": ["a", "b"]}', "no 'gold' or 'answer'"),
        ('{"context": "a", "query": "a", "choices": ["a", "b"], "gold": 0}', "both"),
        ('{"context": "a", "choices": [], "gold": 0}', "not two texts or more"),
        ('{"context": "a", "choices": ["a"], "gold": 0}', "not two texts or more"),
        ('{"context": "a", "choices": ["a", ""], "gold": 0}', "not two texts or more"),
        ('{"context": "a", "choices": ["a", 2], "gold": 0}', "not two texts or more"),
        ('{"context": "a", "choices": "ab", "gold": 0}', "not two texts or more"),
        (
            '{"context": 1, "choices": ["a", "b"], "gold": 0}',
            "is a number, not a string",
        ),
        ('{"context": "a", "choices": ["a", "b"], "gold": 2}', "answer 2 of 2"),
        ('{"context": "a", "choices": ["a", "b"], "gold": "A"}', "answer 'A' of 2"),
        ('{"context": "a", "choices": ["a", "b"], "gold": true}', "answer True of 2"),
    ],
)
def test_a_row_that_is_no_question_is_named(tmp_path: Path, row: str, told: str):
    path = tmp_path / "bad.jsonl"
    good = '{"context": "one", "choices": ["a", "b"], "gold": 1}\n'
    path.write_text(good + row + "\n")
    with pytest.raises(BadInput, match=f"bad.jsonl line 2 .*{told}") as refused:
        read_questions(path)
    assert "choices" in refused.value.allowed and refused.value.fix


@pytest.mark.parametrize("content", [None, b"", b"\n", b"\xff\n"])
def test_a_file_without_questions_is_refused(tmp_path: Path, content: bytes | None):
    path = tmp_path / "none.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput, match="none.jsonl"):
        read_questions(path)
