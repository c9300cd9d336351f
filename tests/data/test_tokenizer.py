# SPDX-License-Identifier: Apache-2.0
"""The tokenizer loses nothing, and is the same each time."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.data import tokenizer
from hetjax.errors import BadInput

_OWN_TEXT = Path(__file__).read_text()
_TRAINED = tokenizer.train([_OWN_TEXT], 400)
_END = "<|endoftext|>"


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_survives_encoding_and_decoding(text):
    assert _TRAINED.decode(_TRAINED.encode(text)) == text


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(), max_size=5))
def test_documents_come_back_in_order_each_followed_by_one_end(documents):
    ids_T = _TRAINED.encode_documents(documents)
    ends = np.flatnonzero(ids_T == _TRAINED.end_of_document)
    starts = [0, *(ends + 1)]
    back = [_TRAINED.decode(ids_T[a:b]) for a, b in zip(starts, ends, strict=False)]
    assert back == documents
    assert len(ids_T) == 0 or ids_T[-1] == _TRAINED.end_of_document


def test_a_text_that_spells_the_marker_out_stays_text():
    text = f"one{_END}two"
    assert _TRAINED.end_of_document not in _TRAINED.encode(text)
    assert _TRAINED.decode(_TRAINED.encode(text)) == text


def test_an_end_of_document_shows_in_the_decoded_text():
    assert _TRAINED.decode(_TRAINED.encode_documents(["a", "b"])) == f"a{_END}b{_END}"


@pytest.mark.parametrize("line", ["word " * 9 + "\n", "\u00e9\u4e16 "])
def test_a_document_longer_than_one_piece_loses_nothing(line):
    text = line * 40_000
    ids_T = _TRAINED.encode_documents([text, "next"])
    assert _TRAINED.decode(ids_T) == f"{text}{_END}next{_END}"


def test_merges_make_the_learnt_text_shorter_than_its_bytes():
    assert _TRAINED.vocab_size == 400
    assert len(_TRAINED.encode(_OWN_TEXT)) < 0.6 * len(_OWN_TEXT.encode())


def test_257_tokens_are_the_bytes_and_the_end_of_a_document():
    plain = tokenizer.train([_OWN_TEXT], 257)
    text = "h\u00e9t\n\0"
    assert plain.vocab_size == 257
    assert len(plain.encode(text)) == len(text.encode())


@pytest.mark.parametrize("vocab_size", [256, 1, 0, -5])
def test_a_vocabulary_without_room_for_every_byte_is_refused(vocab_size):
    with pytest.raises(BadInput) as caught:
        tokenizer.train(["text"], vocab_size)
    assert str(caught.value) == (
        f"got: vocabulary of {vocab_size} tokens\n"
        "allowed: at least 257: 256 bytes and the end of a document\n"
        "fix: use a model with a vocabulary of 1024, say"
    )


def test_a_saved_tokenizer_is_the_same_after_loading(tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(_TRAINED, path)
    loaded = tokenizer.load(path)
    text = f"{_OWN_TEXT}{_END}\u00e9"
    assert loaded.encode(text) == _TRAINED.encode(text)
    assert loaded.end_of_document == _TRAINED.end_of_document
    assert loaded.decode(loaded.encode(text)) == text


def test_another_process_learns_the_same_tokenizer(tmp_path):
    code = """
import sys
from pathlib import Path
from hetjax.data import tokenizer
trained = tokenizer.train([Path(sys.argv[1]).read_text()], 400)
tokenizer.save(trained, Path(sys.argv[2]))
"""
    theirs, ours = tmp_path / "theirs.json", tmp_path / "ours.json"
    root = Path(tokenizer.__file__).parents[2]
    command = [sys.executable, "-c", code, __file__, str(theirs)]
    subprocess.run(command, cwd=root, check=True)
    tokenizer.save(_TRAINED, ours)
    assert theirs.read_bytes() == ours.read_bytes()


def test_ids_above_16_bits_get_a_wider_type():
    class Large(tokenizer.Tokenizer):
        @property
        def vocab_size(self) -> int:
            return 70_000

    assert _TRAINED.encode_documents(["text"]).dtype == np.uint16
    assert Large(_TRAINED.core).encode_documents(["text"]).dtype == np.int32


def test_a_sample_ends_at_its_limit():
    assert list(tokenizer.sample(["abc", "def", "ghi"], 5)) == ["abc", "de"]
    assert list(tokenizer.sample(["abc"], 5)) == ["abc"]
    assert list(tokenizer.sample(["abc", "def"], 3)) == ["abc"]
