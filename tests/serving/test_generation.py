# SPDX-License-Identifier: Apache-2.0
"""Tokens become text as they arrive: whole characters, and no part of the stop text."""

import pytest

from hetjax.data.tokenizer import Tokenizer, train
from hetjax.serving.generation import Writing, write_text


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(["a b"], 257)  # one token per byte


def pieces(writing: Writing, tokens: list[int], asked: int = 1_000) -> list[str]:
    said: list[str] = []
    write_text(iter(tokens), writing, said.append, asked=asked)
    assert "".join(said) == writing.text
    return said


TEXT = "naïve 🐈 Zoë 漢字"


def test_a_character_of_several_tokens_is_shown_once_it_is_whole(tokenizer: Tokenizer):
    tokens = tokenizer.encode(TEXT)
    assert len(tokens) == len(TEXT.encode())
    writing = Writing(tokenizer, ends=())
    assert pieces(writing, tokens, asked=len(tokens)) == list(TEXT)
    assert writing.reason == "tokens"


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer: Tokenizer):
    tokens = tokenizer.encode("ab🐈")[:-1]
    writing = Writing(tokenizer, ends=())
    assert pieces(writing, tokens) == ["a", "b", "\ufffd"]
    assert writing.reason == "max_seq_len"


def test_nothing_is_shown_from_the_token_that_ends_a_text(tokenizer: Tokenizer):
    end = tokenizer.end_of_document
    writing = Writing(tokenizer, ends={end})
    tokens = [*tokenizer.encode("ab"), end, *tokenizer.encode("cd")]
    assert pieces(writing, tokens) == ["a", "b"]
    assert writing.reason == "end" and writing.tokens == tokens[:3]


@pytest.mark.parametrize("stop", ["\n\n", "aab", "漢", "bX", "ab"])
@pytest.mark.parametrize("text", ["aaab\n\nc", "aa\n", "a漢b", "a\nb\n\n", "abab", ""])
def test_the_text_ends_before_the_stop_text(tokenizer: Tokenizer, stop: str, text: str):
    writing = Writing(tokenizer, ends=(), stop=stop)
    tokens = tokenizer.encode(text)
    said = pieces(writing, tokens, asked=len(tokens))
    assert "".join(said) == text.partition(stop)[0]
    assert (writing.reason == "stop") == (stop in text)
    read = len(text.partition(stop)[0].encode()) + len(stop.encode())
    assert len(writing.tokens) == (read if stop in text else len(tokens))


def test_what_may_become_the_stop_text_is_shown_when_an_end_comes_first(
    tokenizer: Tokenizer,
):
    end = tokenizer.end_of_document
    writing = Writing(tokenizer, ends={end}, stop="abc")
    assert pieces(writing, [*tokenizer.encode("xab"), end]) == ["x", "ab"]
