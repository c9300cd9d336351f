# SPDX-License-Identifier: Apache-2.0
"""Samples the text that is shown at an evaluation.

Does not own how a token is chosen (`hetjax/serving/sampling.py`) nor how logits are
computed (`hetjax/training/recovery/driver.py`). Legend: V words.
"""

from collections.abc import Callable, Sequence

import numpy as np

from hetjax.data.tokenizer import Tokenizer
from hetjax.serving.sampling import Sampling, choose
from hetjax.training.settings.config import EvaluationConfig


def sample_text(
    next_logits: Callable[[Sequence[int]], np.ndarray],
    tokenizer: Tokenizer,
    config: EvaluationConfig,
    seed: tuple[int, int],
) -> str:
    """Return the prompt and sampled text; the same seed gives the same choice.

    `next_logits` returns the logits_V of the token after those that are passed to it.
    """
    sampling, rng = (
        Sampling(temperature=config.temperature),
        np.random.default_rng(seed),
    )
    tokens = tokenizer.start(config.prompt)
    num_given = len(tokens)
    for _ in range(config.sample_tokens):
        # a model may have more rows than the tokenizer has ids
        logits_V = next_logits(tokens)[: tokenizer.vocab_size]
        tokens.append(choose(logits_V, sampling, rng))
    return config.prompt + tokenizer.decode(tokens[num_given:])
