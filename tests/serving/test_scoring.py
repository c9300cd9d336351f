# SPDX-License-Identifier: Apache-2.0
"""Scores of texts and of choices, against the model in one jit, token by token."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.api.trained_model import TrainedModel
from hetjax.data.hugging_face import read_tokenizer
from hetjax.serving.scoring import windows
from tests.serving.model_folder import log_likelihoods, write_folder

DOCUMENTS = [
    "A cat sat on the mat. " * 9,
    "naïve 漢字 🐈",
    "",
    "To be, or not to be: that is the question.",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def model(folder: Path) -> TrainedModel:
    return TrainedModel(folder)


@given(
    counted=st.lists(st.booleans(), max_size=40),
    length=st.integers(1, 9),
    data=st.data(),
)
def test_each_token_counts_once_in_the_first_window_that_has_it(
    counted: list[bool], length: int, data: st.DataObject
):
    stride = data.draw(st.integers(1, length))
    counted, found = [False, *counted], []
    for window in windows(
        list(range(len(counted))), counted, length=length, stride=stride
    ):
        assert len(window.tokens) <= length + 1
        first = window.tokens[0]
        for token, counts in zip(window.tokens, window.counted, strict=True):
            if counts:
                found.append(token)
                # windows start at multiples of the stride; no earlier window contains
                # the token
                assert first == max(0, math.ceil((token - length) / stride)) * stride
    assert found == [n for n, counts in enumerate(counted) if counts]


@pytest.mark.parametrize(
    ("window", "stride", "batch_size"), [(None, None, 3), (16, None, 2), (20, 7, 1)]
)
def test_bits_per_byte_are_those_of_every_token_by_itself(
    model: TrainedModel, folder: Path, tmp_path: Path, window, stride, batch_size: int
):
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": d}) + "\n" for d in DOCUMENTS))
    found = model.evaluate(file, window=window, stride=stride, batch_size=batch_size)
    length = window or 64
    step = stride or length
    ids, texts = read_tokenizer(folder).ids, list[tuple[list[int], int]]()
    for document in DOCUMENTS:
        tokens = [ids.end_of_document, *ids.encode(document)]
        for n in range(1, len(tokens)):
            begin = max(0, math.ceil((n - length) / step)) * step
            texts.append((tokens[begin:n], tokens[n]))
    total, number = -sum(log_likelihoods(folder, texts)), len(texts)
    num_bytes = len("".join(DOCUMENTS).encode())
    assert (found.num_tokens, found.num_bytes, found.num_rows) == (number, num_bytes, 4)
    assert found.loss == pytest.approx(total / number, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(total / number), rel=1e-4)
    bits = total / math.log(2) / num_bytes
    assert found.bits_per_byte == pytest.approx(bits, rel=1e-5)


def test_of_a_conversation_what_the_assistant_says_counts(
    model: TrainedModel, folder: Path, tmp_path: Path
):
    messages = [
        {"role": "user", "content": "Say two words"},
        {"role": "assistant", "content": "two words"},
    ]
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    found, tokenizer = model.evaluate(file), read_tokenizer(folder)
    assert tokenizer.template is not None
    text = tokenizer.template.render(messages)
    said = "two words<|im_end|>"
    given = tokenizer.ids.encode(text[: text.rindex(said)])
    tokens = given + tokenizer.ids.encode(said)
    texts = [(tokens[:n], tokens[n]) for n in range(len(given), len(tokens))]
    total = sum(log_likelihoods(folder, texts))
    assert found.num_tokens == len(tokens) - len(given)
    assert found.loss == pytest.approx(-total / found.num_tokens, rel=1e-5)


def test_choices_are_judged_by_the_log_likelihoods_of_their_tokens(
    model: TrainedModel, folder: Path, tmp_path: Path
):
    rng = np.random.default_rng(0)
    words = "cat dog mat question answer rain snow the of a".split()
    questions = [
        {
            "query": " ".join(rng.choice(words, 5)) + " " * (n % 2),
            "choices": [
                " ".join(rng.choice(words, k + 1)) for k in range(1 + n % 3, 6)
            ],
            "answer": int(n % 2),
            "subject": "weather",
        }
        for n in range(12)
    ]
    questions[3] = {"context": "", "choices": ["rain", "snow and ice"], "gold": 1}
    questions[4]["query"] = "long " * 40 + "ago"
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(q) + "\n" for q in questions))
    found = model.evaluate_choices(file, batch_size=5)
    ids, texts, owners = read_tokenizer(folder).ids, [], []
    for number, question in enumerate(questions):
        context = question["query" if "query" in question else "context"]
        for index, choice in enumerate(question["choices"]):
            # trailing blanks of the context and the delimiter belong to the choice
            alone = ids.encode(context.rstrip())
            both = ids.encode(context + " " + choice)
            tokens = (alone or [ids.end_of_document]) + both[len(alone) :]
            num_own = len(both) - len(alone)
            tokens = tokens[-65:]
            for n in range(len(tokens) - num_own, len(tokens)):
                texts.append((tokens[:n], tokens[n]))
                owners.append((number, index))
    sums = {owner: 0.0 for owner in owners}
    for owner, found_one in zip(owners, log_likelihoods(folder, texts), strict=True):
        sums[owner] += found_one
    right = by_bytes = 0
    for number, question in enumerate(questions):
        choices = question["choices"]
        gold = question.get("answer", question.get("gold"))
        order = range(len(choices))
        best = max(order, key=lambda i: sums[number, i])
        each = [sums[number, i] / len(choices[i].encode()) for i in order]
        right += best == gold
        by_bytes += each.index(max(each)) == gold
    assert 0 < right < 12 and right != by_bytes  # the two accuracies differ
    assert found.accuracy == right / 12
    assert found.accuracy_by_bytes == by_bytes / 12
    assert (found.num_questions, found.num_cut) == (12, 1)
