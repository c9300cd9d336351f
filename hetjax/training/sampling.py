# SPDX-License-Identifier: Apache-2.0
"""A text that the model goes on with, token by token.

Owns the choice of tokens. Does not own the model's run (`hetjax/runtime/`).
"""

from collections.abc import Callable, Sequence

import numpy as np

from hetjax.data.tokenizer import Tokenizer
from hetjax.training.config import EvaluationConfig

NextLogits = Callable[[Sequence[int]], np.ndarray]  # tokens -> logits_V


def sample_text(
    next_logits: NextLogits,
    tokenizer: Tokenizer,
    config: EvaluationConfig,
    seed: tuple[int, int],
) -> str:
    """Return the prompt and what follows it; the same seed gives the same choice."""
    rng = np.random.default_rng(seed)
    tokens = tokenizer.encode(config.prompt) or [tokenizer.end_of_document]
    num_given = len(tokens)
    for _ in range(config.sample_tokens):
        # a model may have more rows than the tokenizer has ids
        logits_V = next_logits(tokens)[: tokenizer.vocab_size]
        tokens.append(choose(logits_V, config.temperature, rng))
    return config.prompt + tokenizer.decode(tokens[num_given:])


def choose(logits_V: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    """Return an id drawn from softmax(logits / temperature); at 0 the likeliest."""
    if temperature == 0:
        return int(np.argmax(logits_V))
    # the largest of logits with Gumbel noise is distributed as the softmax
    noise_V = rng.gumbel(size=logits_V.shape)
    return int(np.argmax(logits_V.astype(np.float64) / temperature + noise_V))
