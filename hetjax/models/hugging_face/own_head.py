# SPDX-License-Identifier: Apache-2.0
"""Finds out whether a folder stores a head of its own, whatever its config says.

As in transformers, a head that equals the embedding is tied to it. A head that differs
is not, even if `tie_word_embeddings` is true. Imports no JAX.
"""

from functools import lru_cache
from pathlib import Path

from hetjax.models.hugging_face.stored_tensors import Tensors, has_weights

HEAD = "lm_head.weight"


def has_own_head(folder: Path, embedding: str) -> bool:
    """Whether a folder's head differs from its embedding, which has the given name.

    Raises BadInput for weights that cannot be read.
    """
    if not has_weights(folder):
        return False
    files = sorted(folder.glob("*.safetensors*"))
    stamps = tuple((f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in files)
    return _has_own_head(folder, embedding, stamps)


@lru_cache(maxsize=16)
def _has_own_head(
    folder: Path, embedding: str, stamps: tuple[tuple[str, int, int], ...]
) -> bool:
    """The same, cached: a process reads the files again only if `stamps` change."""
    tensors = Tensors(folder)
    if not {HEAD, embedding} <= tensors.places.keys():
        return False
    return not tensors.equal(HEAD, embedding)
