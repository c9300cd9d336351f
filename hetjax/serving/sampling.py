# SPDX-License-Identifier: Apache-2.0
"""Chooses the next token from a model's logits.

Owns the order of the settings: temperature, then the likeliest `top_k`, then of these
the likeliest that together have probability `top_p`, as in transformers.
Legend: V words.
"""

from dataclasses import dataclass

import numpy as np

from hetjax.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The settings of a choice; temperature 0 always means the likeliest token."""

    temperature: float = 0.8
    top_k: int | None = None  # None: all words
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise _outside("temperature", self.temperature, "0 (the likeliest) or more")
        if self.top_k is not None and self.top_k < 1:
            raise _outside("top-k", self.top_k, "1 or more, or none")
        if not 0 < self.top_p <= 1:
            raise _outside("top-p", self.top_p, "above 0, up to 1")
        if self.seed < 0:
            raise _outside("seed", self.seed, "0 or more")


def choose(logits_V: np.ndarray, sampling: Sampling, rng: np.random.Generator) -> int:
    """Return an id, drawn by the settings; on a tie at temperature 0 the first one."""
    if sampling.temperature == 0:
        return int(np.argmax(logits_V))
    p_V = probabilities(logits_V, sampling)
    index_V = np.flatnonzero(p_V)
    return int(rng.choice(index_V, p=p_V[index_V]))


def probabilities(logits_V: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the probability of drawing each word, at a temperature above 0."""
    z_V = logits_V.astype(np.float64) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(z_V):
        last = np.partition(z_V, -sampling.top_k)[-sampling.top_k]
        z_V = np.where(z_V < last, -np.inf, z_V)
    p_V = np.exp(z_V - np.max(z_V))
    p_V /= np.sum(p_V)
    if sampling.top_p < 1:
        p_V = _nucleus(p_V, sampling.top_p)
    return p_V


def _nucleus(p_V: np.ndarray, top_p: float) -> np.ndarray:
    """Keep the fewest words that together have `top_p`; normalise their sum to 1."""
    # smaller probabilities sum to less than 1 - top_p: no need to sort them
    some_V = np.flatnonzero(p_V >= (1 - top_p) / len(p_V))
    order_V = some_V[np.argsort(-p_V[some_V], kind="stable")]
    number = int(np.searchsorted(np.cumsum(p_V[order_V]), top_p)) + 1
    kept_V = np.zeros_like(p_V)
    kept_V[order_V[:number]] = p_V[order_V[:number]]
    return kept_V / np.sum(kept_V)


def _outside(name: str, value: float, allowed: str) -> BadInput:
    return BadInput(got=f"--{name} {value}", allowed=allowed, fix=f"leave --{name} out")
