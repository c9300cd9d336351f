# SPDX-License-Identifier: Apache-2.0
"""Data sets of rows: what is kept of each row, and the resulting windows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetjax.data.batches import (
    num_targets,
    samples,
    validation_batches,
    weights,
)
from hetjax.data.dataset import Dataset, prepare
from hetjax.data.hugging_face import read_tokenizer
from hetjax.data.settings import Ingredients
from hetjax.data.tokens import Rows, Tokens
from hetjax.errors import BadInput
from tests.against_transformers.tokenizer_cases import FOLDER


def _tokens(*rows: tuple[list[int], list[bool]]) -> Tokens:
    """Return the rows, given as (tokens, flags of the learnt ones)."""
    first = [next(i for i, one in enumerate(learnt) if one and i) for _, learnt in rows]
    return Tokens(
        np.array([t for tokens, _ in rows for t in tokens], np.uint16),
        Rows(
            starts_R=np.cumsum([0, *(len(tokens) for tokens, _ in rows)]),
            first_R=np.array(first),
            learnt_T=np.array([one for _, learnt in rows for one in learnt]),
        ),
    )


SHORT = [5, 6, 7], [False, False, True]
LONG = [1, 2, 3, 4, 8, 9], [False, True, False, True, True, True]
LATE = [1, 2, 3, 4, 5, 6], [False, False, False, False, False, True]


def test_a_window_is_a_row_with_targets_where_something_is_learnt():
    inputs_GL, targets_GL = validation_batches([_tokens(SHORT, LONG)], 5, 2, 1)[0]
    assert inputs_GL.tolist() == [[5, 6, 7, 0, 0], [1, 2, 3, 4, 8]]
    assert targets_GL.tolist() == [[-1, 7, -1, -1, -1], [2, -1, 4, 8, 9]]
    assert inputs_GL.dtype == targets_GL.dtype == np.int32
    assert num_targets((inputs_GL, targets_GL)) == 5


def test_a_long_row_is_cut_and_one_without_targets_is_left_out_with_one_warning():
    with pytest.warns(UserWarning) as caught:
        found = samples([_tokens(SHORT, LATE, LONG)], 3, seed=0)
    (message,) = [str(w.message) for w in caught]
    assert message.startswith("2 of 3 rows of the training split are longer than")
    assert "left out: 1 with nothing to learn before the cut" in message
    inputs_GL, targets_GL = found.batch(0, 2)
    pairs = sorted(zip(inputs_GL.tolist(), targets_GL.tolist(), strict=True))
    assert pairs == [([1, 2, 3], [2, -1, 4]), ([5, 6, 7], [-1, 7, -1])]


def test_rows_without_a_target_in_any_window_are_refused():
    with pytest.raises(BadInput) as caught:
        samples([_tokens(LATE)], 3, seed=0)
    assert "1 rows, none with a token to learn among its first 4" in caught.value.got
    assert caught.value.fix == "raise --seq-len to 5 or more"
    assert samples([_tokens(LATE)], 5, seed=0).batch(0, 1)[1].tolist() == [
        [-1] * 4 + [6]
    ]


def test_means_of_batches_are_weighted_by_their_targets():
    batches = validation_batches([_tokens(SHORT, LONG)], 5, 1, 2)
    means, counts = np.array([2.0, 3.0]), np.array([1, 4])
    expected = np.sum(means * counts) / np.sum(counts)
    assert np.mean(weights(batches) * means) == pytest.approx(expected)
    text = validation_batches([Tokens(np.arange(50))], 5, 3, 2)
    assert weights(text) == [1.0, 1.0]


def _chat(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"What is {number}?"},
        {"role": "assistant", "content": f"A number: {number}."},
    ]


def _jsonl(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def _prepared(tmp_path: Path, path: Path, **others: Any) -> Dataset:
    wanted = Ingredients(path=path, tokenizer=FOLDER / "chatml", **others)
    return prepare(tmp_path / "cache", wanted, 300)


def _texts(made: Dataset, tokens: Tokens) -> list[tuple[str, str]]:
    """Return each row's whole text, and the part that is learnt."""
    assert tokens.rows is not None
    found = []
    starts = tokens.rows.starts_R.tolist()
    for start, end in zip(starts, starts[1:], strict=False):
        ids = tokens.tokens_T[start:end]
        learnt = tokens.rows.learnt_T[start:end]
        found.append((made.tokenizer.decode(ids), made.tokenizer.decode(ids[learnt])))
    return found


def test_chats_are_kept_as_the_template_writes_them_and_split_whole(tmp_path: Path):
    chats = [{"messages": _chat(n)} for n in range(40)]
    path = _jsonl(tmp_path / "a.jsonl", *chats, chats[3])
    made = _prepared(tmp_path, path)
    train, aside = (
        _texts(made, side) for side in (made.trains[0], made.validations[0])
    )
    expected = [
        (
            f"<|im_start|>user\nWhat is {n}?<|im_end|>\n"
            f"<|im_start|>assistant\nA number: {n}.<|im_end|>\n",
            f"A number: {n}.<|im_end|>",
        )
        for n in range(40)
    ]
    assert sorted(train + aside) == sorted(expected)
    assert 1 <= len(aside) <= 8
    assert train == [row for row in expected if row in train]  # in order
    learnt = "".join(text for _, text in aside)
    assert made.validations[0].rows is not None
    num_learnt = int(np.sum(made.validations[0].rows.learnt_T))
    assert made.bytes_per_token == len(learnt.encode()) / num_learnt
    assert {"tokenizer.json", "chat_template.jinja"} <= {*made.tokenizer_files}
    again = _prepared(tmp_path, path)
    assert again.hashes == made.hashes
    assert len([*(tmp_path / "cache").iterdir()]) == 1


def test_rows_to_validate_with_come_from_their_own_file(tmp_path: Path):
    path = _jsonl(tmp_path / "a.jsonl", *({"messages": _chat(n)} for n in range(5)))
    other = tmp_path / "other"
    other.mkdir()
    file = _jsonl(other / "b.jsonl", *({"messages": _chat(n)} for n in range(7, 9)))
    made = _prepared(tmp_path, path, validation=file)
    assert len(_texts(made, made.trains[0])) == 5
    assert [learnt for _, learnt in _texts(made, made.validations[0])] == [
        "A number: 7.<|im_end|>",
        "A number: 8.<|im_end|>",
    ]


def test_texts_to_validate_with_come_from_their_own_file(tmp_path: Path):
    path = _jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"})
    file = _jsonl(tmp_path / "b.jsonl", {"text": "three"})
    made = _prepared(tmp_path, path, validation=file)
    decode = made.tokenizer.decode
    assert decode(made.trains[0].tokens_T) == "one</s>two</s>"
    assert decode(made.validations[0].tokens_T) == "three</s>"
    assert made.bytes_per_token == 5 / len(made.validations[0].tokens_T)


def test_a_document_begins_and_ends_as_the_model_wants_it(tmp_path: Path):
    path = _jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two" * 30_000})
    wanted = Ingredients(path=path, validation=path, tokenizer=FOLDER / "headers")
    made = prepare(tmp_path / "cache", wanted, 300)
    expected = f"<s>one</s><s>{'two' * 30_000}</s>"
    assert made.tokenizer.decode(made.trains[0].tokens_T) == expected
    start = [*read_tokenizer(FOLDER / "headers").ids.opening]
    assert made.tokenizer.start("") == start
    assert made.tokenizer.start("one") == start + made.tokenizer.encode("one")


def test_texts_and_chats_do_not_mix(tmp_path: Path):
    path = _jsonl(tmp_path / "a.jsonl", {"text": "one"}, {"messages": _chat(1)})
    with pytest.raises(BadInput, match="both texts and rows with a prompt or messages"):
        _prepared(tmp_path, path)


def test_one_row_is_too_few_to_split(tmp_path: Path):
    path = _jsonl(tmp_path / "a.jsonl", *[{"messages": _chat(1)}] * 3)
    with pytest.raises(BadInput) as error:
        _prepared(tmp_path, path)
    assert "holds a single row and 2 duplicates" in error.value.got
    assert "--data.validation" in error.value.fix


def test_one_row_is_enough_to_learn_from_and_one_to_validate_with(tmp_path: Path):
    paths = (
        _jsonl(tmp_path / f"{number}.jsonl", {"messages": _chat(number)})
        for number in (1, 2)
    )
    made = _prepared(tmp_path, next(paths), validation=next(paths))
    for (tokens,) in made.trains, made.validations:
        assert tokens.rows is not None
        assert len(tokens.rows.first_R) == 1


def test_an_empty_file_to_validate_with_is_named_by_its_option(tmp_path: Path):
    path = _jsonl(tmp_path / "a.jsonl", {"text": "some text"})
    (tmp_path / "b.jsonl").touch()
    with pytest.raises(BadInput) as error:
        _prepared(tmp_path, path, validation=tmp_path / "b.jsonl")
    assert error.value.got.endswith("b.jsonl holds no text (0 documents)")
    assert "point --data.validation at" in error.value.fix


def test_chats_in_which_the_assistant_says_nothing_are_refused(tmp_path: Path):
    silent = [{"messages": _chat(number)[:1]} for number in range(4)]
    path = _jsonl(tmp_path / "a.jsonl", *silent)
    with (
        pytest.warns(UserWarning, match="left out: 3 rows without an answer to learn"),
        pytest.raises(BadInput) as error,
    ):
        _prepared(tmp_path, path)
    assert "split has no answer to learn" in error.value.got
    assert "--data.path" in error.value.fix
