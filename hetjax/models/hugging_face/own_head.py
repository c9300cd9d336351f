# SPDX-License-Identifier: Apache-2.0
"""Whether a folder stores a head of its own, whatever its config says of tied ones.

As transformers does: a head that equals the embedding is tied to it, one that differs
is not, also where `tie_word_embeddings` is true. Imports no JAX.
"""

from functools import lru_cache
from pathlib import Path

from hetjax.models.hugging_face.stored_tensors import Tensors, has_weights

HEAD = "lm_head.weight"
_EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight")


def has_own_head(folder: Path) -> bool:
    """Whether the head that a folder stores differs from its embedding.

    BadInput for weights that cannot be read.
    """
    if not has_weights(folder):
        return False
    files = sorted(folder.glob("*.safetensors*"))
    stamps = tuple((f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in files)
    return _has_own_head(folder, stamps)


@lru_cache(maxsize=16)
def _has_own_head(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> bool:
    """The same; `stamps` change with the files, which are read once in a process."""
    tensors = Tensors(folder)
    embedding = next((name for name in _EMBEDDINGS if name in tensors.places), None)
    if HEAD not in tensors.places or embedding is None:
        return False
    return not tensors.equal(HEAD, embedding)
