# SPDX-License-Identifier: Apache-2.0
"""Sampling follows the probabilities that temperature, top-k and top-p leave."""

from itertools import product

import numpy as np
import pytest

from hetjax.errors import BadInput
from hetjax.serving.sampling import Sampling, choose, probabilities


def oracle(
    logits_V: np.ndarray, temperature: float, top_k: int | None, top_p: float
) -> np.ndarray:
    """Return the probabilities by one loop over the tokens, from the likeliest down."""
    weights = [float(np.exp(float(z) / temperature)) for z in logits_V]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    order = order[: top_k or len(order)]
    total, kept, mass = sum(weights[i] for i in order), [], 0.0
    for index in order:
        kept.append(index)
        mass += weights[index] / total
        if mass >= top_p:
            break
    found = np.zeros(len(weights))
    for index in kept:
        found[index] = weights[index] / sum(weights[i] for i in kept)
    return found


CASES = list(product([0.3, 1.0, 2.0], [None, 1, 4, 99], [0.05, 0.6, 0.95, 1.0]))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), CASES)
def test_probabilities_are_those_of_the_oracle(temperature, top_k, top_p, seed: int):
    logits_V = np.random.default_rng(seed).normal(0, 2, 23).astype(np.float32)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    expected = oracle(logits_V, temperature, top_k, top_p)
    np.testing.assert_allclose(probabilities(logits_V, sampling), expected, atol=1e-12)


def test_tokens_come_as_often_as_they_should():
    logits_V = np.log(np.array([0.5, 0.0, 0.3, 0.2]) + 1e-30)
    sampling, rng = Sampling(temperature=1.0, top_p=0.75), np.random.default_rng(0)
    drawn = [choose(logits_V, sampling, rng) for _ in range(4_000)]
    shares = np.bincount(drawn, minlength=4) / 4_000
    np.testing.assert_allclose(shares, [0.625, 0, 0.375, 0], atol=0.03)


def test_tokens_come_with_the_probabilities_of_the_softmax():
    logits_V = np.array([0.0, 1.0, -1.0, 2.0], np.float32)
    weights_V = np.exp(logits_V / 0.7)
    rng = np.random.default_rng(0)
    sampling = Sampling(temperature=0.7)
    drawn = [choose(logits_V, sampling, rng) for _ in range(20_000)]
    found_V = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(found_V, weights_V / weights_V.sum(), atol=0.015)


def test_at_temperature_0_the_likeliest_token_comes():
    logits_V = np.array([0.0, 3.0, 2.9], np.float32)
    sampling, rngs = Sampling(temperature=0), map(np.random.default_rng, range(20))
    assert {choose(logits_V, sampling, rng) for rng in rngs} == {1}


def test_at_temperature_zero_the_first_of_the_likeliest_is_taken():
    rng = np.random.default_rng(0)
    assert choose(np.array([1.0, 3, 3]), Sampling(temperature=0), rng) == 1


def test_words_that_are_padding_never_come():
    logits_V = np.array([0.0, -np.inf, 0.0])
    assert probabilities(logits_V, Sampling(temperature=5.0))[1] == 0


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temperature": t} for t in (-1, float("nan"), float("inf"))),
        *({"top_p": p} for p in (0, 1.1, float("nan"))),
        {"top_k": 0},
        {"seed": -1},
    ],
)
def test_what_cannot_be_asked_for_is_refused(wrong):
    with pytest.raises(BadInput) as refused:
        Sampling(**wrong)
    assert refused.value.got.startswith("--") and refused.value.fix
