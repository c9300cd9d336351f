# SPDX-License-Identifier: Apache-2.0
"""Sampled texts follow the logits, the temperature and the seed."""

import numpy as np

from hetjax.data.tokenizer import train
from hetjax.training.config import EvaluationConfig
from hetjax.training.loop import choose, sample_text


def test_tokens_come_with_the_probabilities_of_the_softmax():
    logits_V = np.array([0.0, 1.0, -1.0, 2.0], np.float32)
    weights_V = np.exp(logits_V / 0.7)
    rng = np.random.default_rng(0)
    drawn = [choose(logits_V, 0.7, rng) for _ in range(20_000)]
    found_V = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(found_V, weights_V / weights_V.sum(), atol=0.015)


def test_at_temperature_0_the_likeliest_token_comes():
    logits_V = np.array([0.0, 3.0, 2.9], np.float32)
    assert {choose(logits_V, 0.0, np.random.default_rng(s)) for s in range(20)} == {1}


def test_the_text_starts_with_the_prompt_and_goes_on_token_by_token():
    tokenizer = train(["a b c"], 257)
    seen: list[list[int]] = []

    def next_logits(tokens):
        seen.append(list(tokens))
        logits_V = np.zeros(400, np.float32)  # more rows than the tokenizer has ids
        logits_V[399] = 99.0
        logits_V[tokens[-1] + 1] = 50.0
        return logits_V

    config = EvaluationConfig(prompt="a", sample_tokens=3, temperature=0.0)
    a = tokenizer.encode("a")[0]
    text = sample_text(next_logits, tokenizer, config, seed=(0, 0))
    assert text == "a" + tokenizer.decode([a + 1, a + 2, a + 3])
    assert seen == [[a], [a, a + 1], [a, a + 1, a + 2]]


def test_without_a_prompt_a_document_starts_and_a_seed_gives_the_same_text():
    tokenizer = train(["a b c"], 257)
    starts: list[list[int]] = []

    def next_logits(tokens):
        starts.append(list(tokens))
        return np.zeros(257, np.float32)

    config = EvaluationConfig(sample_tokens=8)
    texts = [sample_text(next_logits, tokenizer, config, (0, s)) for s in (1, 1, 2)]
    assert starts[0] == [tokenizer.end_of_document]
    assert texts[0] == texts[1] != texts[2]
