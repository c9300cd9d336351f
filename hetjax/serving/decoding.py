# SPDX-License-Identifier: Apache-2.0
"""Continues a text: each token passes the layers once, and the layers keep caches.

Owns the compiled programs of continuing layers, the lengths for which they are
compiled, and the caches of one text. Does not own the choice of tokens (`sampling.py`)
nor the layers' use of their caches (`models/attention/attention.py`).
Legend: B = 1 sequence, L new positions, D residual width, V padded vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from hetjax.models.decoding import check_continuing, continued, room
from hetjax.models.model import ModuleSpec, Params, bind
from hetjax.serving.loaded_model import LoadedModel

LENGTHS = (1, 16, 64, 256)  # numbers of new positions with a compiled program
_LONGEST = LENGTHS[-1]

Kept = tuple[Any, ...]  # caches, by module of a layer


class Text(Protocol):
    """One text; `prefill` comes first, then `decode` for every token."""

    def prefill(self, tokens: Sequence[int]) -> np.ndarray:
        """Return logits_V (fp32) after these tokens, of which there is at least one."""
        ...

    def decode(self, token: int) -> np.ndarray:
        """Append the token; return logits_V (fp32) of the token after it."""
        ...


class ChunkedText:
    """A `Text` whose tokens pass the layers in pieces of a few lengths.

    `forward` returns the logits_V after a piece, which starts at position `start`,
    where the previous piece ends.
    """

    def __init__(self) -> None:
        self._length = 0

    def prefill(self, tokens: Sequence[int]) -> np.ndarray:
        assert self._length == 0 and len(tokens) > 0
        logits_V = np.zeros(0)
        for start in range(0, len(tokens), _LONGEST):
            logits_V = self._added(tokens[start : start + _LONGEST])
        return logits_V

    def decode(self, token: int) -> np.ndarray:
        assert self._length > 0
        return self._added([token])

    def _added(self, tokens: Sequence[int]) -> np.ndarray:
        logits_V = self.forward(tokens, self._length)
        self._length += len(tokens)
        return logits_V

    def forward(self, tokens: Sequence[int], start: int) -> np.ndarray:
        raise NotImplementedError


class Continuation(ChunkedText):
    """One text of at most `num_positions` tokens, on devices of this process.

    The layers' caches are allocated once, and reused at each step.
    """

    def __init__(self, loaded: LoadedModel, num_positions: int) -> None:
        """Allocate the caches. Raises BadInput for a module that cannot continue."""
        super().__init__()
        self._loaded = loaded
        *body, last = loaded.layers
        *before_head, self._head = last.specs
        layers = [(layer.specs, layer.params, layer.device) for layer in body]
        layers.append((tuple(before_head), last.params, last.device))
        self._layers = [layer for layer in layers if layer[0]]
        for specs, _, _ in self._layers:
            check_continuing(specs)
        size = room_for(num_positions)
        self._kept = [
            _keeps(specs, size, _own_params(specs, params))
            for specs, params, _ in self._layers
        ]

    def forward(self, tokens: Sequence[int], start: int) -> np.ndarray:
        num_tokens = len(tokens)
        x: Any = filled(tokens)
        for at, (specs, params, device) in enumerate(self._layers):
            x = jax.device_put(x, device)
            x, self._kept[at] = _continued(
                specs, _own_params(specs, params), x, self._kept[at], np.int32(start)
            )
        last = self._loaded.layers[-1]
        x = jax.device_put(x, last.device)
        params = last.params[self._head.name]
        logits_V = _logits(self._head, params, x, np.int32(num_tokens - 1))
        return np.asarray(logits_V)[: self._loaded.model.vocab_size]


def _own_params(
    specs: tuple[ModuleSpec, ...], params: dict[str, Params]
) -> dict[str, Params]:
    return {spec.name: params[spec.name] for spec in specs}


def filled(tokens: Sequence[int]) -> np.ndarray:
    """Return tokens_BL padded to one of the lengths; the padding comes last, and its
    cache entries are overwritten later."""
    length = next(length for length in LENGTHS if length >= len(tokens))
    tokens_BL = np.zeros((1, length), np.int32)
    tokens_BL[0, : len(tokens)] = tokens
    return tokens_BL


def room_for(num_positions: int) -> int:
    """Return a cache size that has room for padding; few sizes, to reuse programs."""
    fitting = (length for length in LENGTHS if length >= num_positions)
    return next(fitting, -(-num_positions // _LONGEST) * _LONGEST)


@partial(jax.jit, static_argnums=(0, 1))
def _keeps(specs: tuple[ModuleSpec, ...], size: int, params: dict[str, Params]) -> Kept:
    return tuple(room(spec, params[spec.name], size) for spec in specs)


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def _continued(
    specs: tuple[ModuleSpec, ...],
    params: dict[str, Params],
    x: jax.Array,
    kept: Kept,
    start: jax.Array,
) -> tuple[jax.Array, Kept]:
    now: list[Any] = []
    for spec, before in zip(specs, kept, strict=True):
        x, after = continued(spec, params[spec.name], x, before, start)
        now.append(after)
    return x, tuple(now)


@partial(jax.jit, static_argnums=0)
def _logits(spec: ModuleSpec, params: Params, x_BLD: jax.Array, at: jax.Array):
    x_11D = jax.lax.dynamic_slice_in_dim(x_BLD, at, 1, axis=1)
    head: Any = bind(spec, params)
    return head.logits(x_11D)[0, 0]
