# SPDX-License-Identifier: Apache-2.0
"""Computes the log-likelihoods of given tokens under a model.

Owns the division of tokens into windows, in which each token counts once, and of
windows into batches of a few lengths. Does not own which tokens count
(`text_score.py`, `choice_score.py`).
Legend: B sequences, L positions, D residual width, V padded vocabulary, T tokens of a
passage, N = B x L.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.models.model import ModuleSpec, Params, apply, bind
from hetjax.serving.loaded_model import LoadedModel

_SHORTEST = 16  # positions; lengths are this times powers of two, up to the longest
_BLOCK_BYTES = 128 * 2**20  # of fp32 logits that exist at once


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens, whether each is `counted`, and the number of their `passage`.

    The first token of all has no predecessor, and cannot count.
    """

    tokens: Sequence[int]
    counted: Sequence[bool]
    passage: int = 0


def windows(
    tokens: Sequence[int],
    counted: Sequence[bool],
    *,
    length: int,
    stride: int,
    passage: int = 0,
) -> Iterator[Window]:
    """Yield windows in which each token with `counted` counts exactly once.

    A window has `length` inputs, and starts `stride` after the previous window. In the
    first window all targets count, in others all except the first `length` - `stride`.
    """
    assert 0 < stride <= length and not counted[0]
    done = 1
    for start in range(0, max(len(tokens) - 1, 1), stride):
        end = min(start + length + 1, len(tokens))
        fresh = [n >= done and counted[n] for n in range(start, end)]
        if any(fresh):
            yield Window(tokens[start:end], fresh, passage)
        done = end
        if end == len(tokens):
            return


class Scorer(Protocol):
    """Yields each window with the sum of the log-likelihoods (nats) of its counted
    tokens; no window has more than `length` inputs."""

    def __call__(
        self, given: Iterable[Window], *, length: int
    ) -> Iterator[tuple[Window, float]]: ...


def scorer(loaded: LoadedModel, batch_size: int) -> Scorer:
    """Return a scorer for a model on devices of this process.

    It scores `batch_size` windows at once.
    """

    def score(
        given: Iterable[Window], *, length: int
    ) -> Iterator[tuple[Window, float]]:
        both = log_likelihoods(loaded, given, length=length, batch_size=batch_size)
        for window, found_T in both:
            yield window, float(np.sum(found_T, dtype=np.float64))

    return score


def log_likelihoods(
    loaded: LoadedModel, given: Iterable[Window], *, length: int, batch_size: int
) -> Iterator[tuple[Window, np.ndarray]]:
    """Yield each window with the log-likelihoods (fp32, nats) of its counted tokens.

    No window has more than `length` inputs; batches have `batch_size` windows.
    """
    given = iter(given)
    while batch := list(islice(given, batch_size)):
        yield from zip(batch, _scored(loaded, batch, length, batch_size), strict=True)


def _scored(
    loaded: LoadedModel, batch: Sequence[Window], length: int, batch_size: int
) -> Iterator[np.ndarray]:
    tokens_BL = filled_batch(batch, length, batch_size)
    found_BL = token_log_likelihoods(loaded, tokens_BL[:, :-1], tokens_BL[:, 1:])
    for row_L, window in zip(found_BL, batch, strict=False):
        yield row_L[: len(window.tokens) - 1][np.array(window.counted[1:], bool)]


def filled_batch(batch: Sequence[Window], length: int, num_rows: int) -> np.ndarray:
    """Return the windows as rows of inputs and a last target, of one of a few lengths.

    Padding rows and positions come last, where no real token sees them.
    """
    longest = max(len(window.tokens) for window in batch) - 1
    size = _SHORTEST
    while size < longest:
        size *= 2
    tokens_BL = np.zeros((num_rows, max(min(size, length), longest) + 1), np.int32)
    for row_L, window in zip(tokens_BL, batch, strict=False):
        row_L[: len(window.tokens)] = window.tokens
    return tokens_BL


def token_log_likelihoods(
    loaded: LoadedModel, tokens_BL: np.ndarray, targets_BL: np.ndarray
) -> np.ndarray:
    """Return the log-likelihood (fp32, nats) of each target after the tokens up to it.

    `tokens_BL` are the inputs, `targets_BL` the token after each input.
    """
    *body, last = loaded.layers
    *before_head, head = last.specs
    x: Any = tokens_BL
    for layer in body:
        x = _passed(layer.specs, layer.params, jax.device_put(x, layer.device))
    x = jax.device_put(x, last.device)
    if before_head:
        x = _passed(tuple(before_head), last.params, x)
    targets = jax.device_put(targets_BL, last.device)
    return np.asarray(_of_targets(head, last.params[head.name], x, targets))


@partial(jax.jit, static_argnums=0)
def _passed(
    specs: tuple[ModuleSpec, ...], params: dict[str, Params], x: jax.Array
) -> jax.Array:
    for spec in specs:
        x, _ = apply(spec, params[spec.name], x)
    return x


@partial(jax.jit, static_argnums=0)
def _of_targets(
    spec: ModuleSpec, params: Params, x_BLD: jax.Array, targets_BL: jax.Array
) -> jax.Array:
    """Return the log-likelihoods of targets, with the logits of one block at a time."""
    head: Any = bind(spec, params)

    def token_log_probability(of_token: tuple[jax.Array, jax.Array]) -> jax.Array:
        x_D, target = of_token
        logits_V = head.logits(x_D[None, None])[0, 0]
        return logits_V[target] - jax.nn.logsumexp(logits_V)

    of_tokens = x_BLD.reshape(-1, x_BLD.shape[-1]), targets_BL.reshape(-1)
    num_words = jax.eval_shape(head.logits, x_BLD[:1, :1]).shape[-1]
    at_once = max(_BLOCK_BYTES // (4 * num_words), 1)
    found_N = jax.lax.map(
        token_log_probability, of_tokens, batch_size=min(at_once, targets_BL.size)
    )
    return found_N.astype(jnp.float32).reshape(targets_BL.shape)
