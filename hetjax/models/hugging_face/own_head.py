# SPDX-License-Identifier: Apache-2.0
"""Whether a folder stores a head of its own, whatever its config says of tied ones.

As transformers does: a head that equals the embedding is tied to it, one that differs
is not, also where `tie_word_embeddings` is true. Imports no JAX.
"""

from functools import lru_cache
from pathlib import Path

from hetjax.models.hugging_face.stored_tensors import Tensors, has_weights

HEAD = "lm_head.weight"


def has_own_head(folder: Path, embedding: str) -> bool:
    """Whether the head that a folder stores differs from its embedding, by its name.

    BadInput for weights that cannot be read.
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
    """The same; `stamps` change with the files, which are read once in a process."""
    tensors = Tensors(folder)
    if not {HEAD, embedding} <= tensors.places.keys():
        return False
    return not tensors.equal(HEAD, embedding)
