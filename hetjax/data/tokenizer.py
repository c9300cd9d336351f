# SPDX-License-Identifier: Apache-2.0
"""A byte-level BPE: any text to token ids and back without loss.

Owns training, files and encoding. Does not own the documents (`corpus.py`) nor where
the results are kept (`dataset.py`). Shape legend: T tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from hetjax.errors import BadInput

END_OF_DOCUMENT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # every byte and the end of a document
_PIECE_CHARS = 1 << 16  # bounds what one encoding call holds in memory
_PIECES_PER_CALL = 64


@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """Text to ids below `vocab_size` and back."""

    core: tokenizers.Tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of ids in use; a tiny text may have given fewer than were asked."""
        return self.core.get_vocab_size()

    @property
    def end_of_document(self) -> int:
        """The id that follows each document."""
        token = self.core.token_to_id(END_OF_DOCUMENT)
        assert token is not None
        return token

    def encode(self, text: str) -> list[int]:
        """Give the ids of a text, without an end of document."""
        return self.core.encode(text).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Give the text of ids.

        An end of document shows as its marker, half a character as U+FFFD.
        """
        return self.core.decode([int(i) for i in ids], skip_special_tokens=False)

    def encode_documents(self, documents: Sequence[str]) -> np.ndarray:
        """Give one array tokens_T: each document and an end of document after it.

        uint16 where the ids fit, else int32.
        """
        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.int32
        parts = [np.asarray(ids, dtype) for ids in self._streams(documents)]
        return np.concatenate(parts) if parts else np.zeros(0, dtype)

    def _streams(self, documents: Sequence[str]) -> Iterator[list[int]]:
        pieces = _pieces(documents)
        while group := list(islice(pieces, _PIECES_PER_CALL)):
            encodings = self.core.encode_batch_fast([text for text, _ in group])
            for encoding, (_, is_last) in zip(encodings, group, strict=True):
                yield encoding.ids + [self.end_of_document] * is_last


def check_vocab_size(vocab_size: int) -> None:
    """Raise BadInput for a vocabulary that cannot hold every byte."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise BadInput(
            got=f"vocabulary of {vocab_size} tokens",
            allowed=f"at least {MIN_VOCAB_SIZE}: 256 bytes and the end of a document",
            fix="use a model with a vocabulary of 1024, say",
        )


def train(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a vocabulary; the same documents in the same order give the same one."""
    check_vocab_size(vocab_size)
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    core.train_from_iterator((text for text, _ in _pieces(documents)), trainer)
    return _literal(core)


def sample(documents: Iterable[str], max_chars: int) -> Iterator[str]:
    """Yield documents until they hold `max_chars`, the last one cut short."""
    for text in documents:
        if max_chars <= 0:
            return
        yield text[:max_chars]
        max_chars -= len(text)


def save(tokenizer: Tokenizer, path: Path) -> None:
    """Write the tokenizer as JSON."""
    path.write_text(tokenizer.core.to_str(), encoding="utf-8")


def load(path: Path) -> Tokenizer:
    """Read what `save` wrote."""
    return _literal(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))


def _literal(core: tokenizers.Tokenizer) -> Tokenizer:
    # A text that spells the marker out must stay that text, or decoding would lie.
    core.encode_special_tokens = True
    return Tokenizer(core)


def _pieces(documents: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether a document ends with it), cut at lines where possible."""
    for text in documents:
        start = 0
        while len(text) - start > _PIECE_CHARS:
            line = text.rfind("\n", start, start + _PIECE_CHARS) + 1
            end = line or start + _PIECE_CHARS
            yield text[start:end], False
            start = end
        yield text[start:], True
