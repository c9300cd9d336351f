# SPDX-License-Identifier: Apache-2.0
"""Sampled texts follow the logits and the seed."""

import numpy as np

from hetjax.data.tokenizer import train
from hetjax.training.sampling import sample_text
from hetjax.training.settings.config import EvaluationConfig


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
