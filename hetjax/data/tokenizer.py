# SPDX-License-Identifier: Apache-2.0
"""Converts text to token ids and back; our own is a lossless byte-level BPE.

Owns training, files and encoding. Does not own the documents (`corpus.py`), the
tokenizers of other models (`hugging_face.py`) nor where the results are kept
(`dataset.py`). Shape legend: T tokens.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from hetjax.errors import BadInput
from hetjax.files.reading import read_text

END_OF_DOCUMENT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # every byte and the end of a document
_PIECE_CHARS = 1 << 16  # bounds what one encoding call holds in memory
_CALL_CHARS = 1 << 20
# Put before each piece but the first of its document; its ids are then dropped. Some
# tokenizers put a blank before whatever text they encode
_LEAD = "\n"


@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """Text to ids below `vocab_size` and back."""

    core: tokenizers.Tokenizer
    opening: tuple[int, ...] = ()  # ids before each document
    end: int | None = None  # the id after each document; None: that of our own marker

    @property
    def vocab_size(self) -> int:
        """The number of ids in use; a tiny text may have given fewer than requested."""
        return self.core.get_vocab_size()

    @property
    def end_of_document(self) -> int:
        """The id that follows each document."""
        if self.end is not None:
            return self.end
        token = self.core.token_to_id(END_OF_DOCUMENT)
        assert token is not None
        return token

    @property
    def dtype(self) -> type[np.uint16] | type[np.int32]:
        """The dtype in which ids are stored."""
        return np.uint16 if self.vocab_size <= 1 << 16 else np.int32

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without those around a document."""
        with panics_refused():
            return self.core.encode(text, add_special_tokens=False).ids

    def start(self, prompt: str) -> list[int]:
        """Return the ids that a model is to continue; at least one, for no prompt."""
        return [*self.opening, *self.encode(prompt)] or [self.end_of_document]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids.

        An end of document shows as its marker, half a character as U+FFFD.
        """
        with panics_refused():
            return self.core.decode([int(i) for i in ids], skip_special_tokens=False)

    def encode_documents(self, documents: Iterable[str]) -> np.ndarray:
        """Return tokens_T of all documents in one array, else as `document_tokens`."""
        parts = list(self.document_tokens(documents))
        return np.concatenate(parts) if parts else np.zeros(0, self.dtype)

    def document_tokens(self, documents: Iterable[str]) -> Iterator[np.ndarray]:
        """Yield tokens_T of many documents, each between its opening and its end.

        Uses all cores, and holds only the documents that two calls encode.
        """
        lead = self.encode(_LEAD)
        for pieces, encodings in _encoded(self.core, _groups(_pieces(documents))):
            found: list[int] = []
            for piece, encoding in zip(pieces, encodings, strict=True):
                ids = encoding.ids
                if piece.is_first:
                    found.extend(self.opening)
                elif ids[: len(lead)] == lead:
                    ids = ids[len(lead) :]
                found.extend(ids)
                found.extend([self.end_of_document] if piece.is_last else ())
            yield np.array(found, self.dtype)


@contextmanager
def panics_refused() -> Iterator[None]:
    """Raise BadInput for a panic of the library, which is no Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise BadInput(
            got=f"a tokenizer that fails on a text ({str(error)[:200]})",
            allowed="a tokenizer.json that encodes every text",
            fix="fetch or save the tokenizer again, or give another --data.tokenizer",
        ) from error


def check_vocab_size(vocab_size: int) -> None:
    """Raise BadInput for a vocabulary that cannot hold every byte."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise BadInput(
            got=f"vocabulary of {vocab_size} tokens",
            allowed=f"at least {MIN_VOCAB_SIZE}: 256 bytes and the end of a document",
            fix="use a model with a vocabulary of 1024, say",
        )


def train(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a vocabulary, which depends only on the documents and their order."""
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
    core.train_from_iterator((piece.text for piece in _pieces(documents)), trainer)
    return own_tokenizer(core)


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
    text = read_text(path, what="tokenizer")
    return own_tokenizer(tokenizers.Tokenizer.from_str(text))


def own_tokenizer(core: tokenizers.Tokenizer) -> Tokenizer:
    """Wrap a tokenizer that `train` made."""
    # A text that spells the marker out must stay that text, or decoding would lie.
    core.encode_special_tokens = True
    return Tokenizer(core)


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    is_first: bool
    is_last: bool


def _pieces(documents: Iterable[str]) -> Iterator[_Piece]:
    """Cut long documents, where possible before a line that begins with no blank: no
    token of the tokenizers that we know spans such a place."""
    for text in documents:
        start = 0
        while len(text) - start > _PIECE_CHARS:
            end = _last_line(text, start, start + _PIECE_CHARS)
            yield _Piece(text[start:end], start == 0, False)
            start = end
        yield _Piece(text[start:], start == 0, True)


def _last_line(text: str, start: int, end: int) -> int:
    """Return the start of a part's last line that begins with no blank, or its end."""
    at = end
    while (at := text.rfind("\n", start, at)) >= start:
        if at + 1 < end and not text[at + 1].isspace():
            return at + 1
    return end


def _groups(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Yield the pieces of each encoding call: enough for all cores."""
    group: list[_Piece] = []
    num_chars = 0
    for piece in pieces:
        group.append(piece)
        num_chars += len(piece.text)
        if num_chars >= _CALL_CHARS:
            yield group
            group, num_chars = [], 0
    if group:
        yield group


def _encoded(
    core: tokenizers.Tokenizer, groups: Iterable[list[_Piece]]
) -> Iterator[tuple[list[_Piece], list[tokenizers.Encoding]]]:
    """Encode one group while the group before is used and the next is read."""
    encode = partial(core.encode_batch_fast, add_special_tokens=False)
    with ThreadPoolExecutor(1, thread_name_prefix="encoding") as thread:
        before: tuple[list[_Piece], Future[list[tokenizers.Encoding]]] | None = None
        for group in groups:
            texts = [p.text if p.is_first else _LEAD + p.text for p in group]
            now = group, thread.submit(encode, texts)
            if before is not None:
                yield before[0], _result(before[1])
            before = now
        if before is not None:
            yield before[0], _result(before[1])


def _result(encoded: "Future[list[tokenizers.Encoding]]") -> list[tokenizers.Encoding]:
    with panics_refused():
        return encoded.result()
