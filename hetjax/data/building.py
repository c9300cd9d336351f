# SPDX-License-Identifier: Apache-2.0
"""Builds token files from rows, which are read as often as needed and never all held.

Owns the order of the readings, the sample that a tokenizer learns from and the arrays
on disk. Does not own their directory (`dataset.py`), ids (`tokenizer.py`) nor which
rows go where (`splitting.py`).

Shape legend: T tokens of a split, R its rows. Documents have only `NAME.npy`. Other
rows also have `NAME_starts.npy` (where each row begins, R + 1 numbers),
`NAME_learnt.npy` (bool: which tokens the loss counts) and `NAME_first.npy` (the place
of the first such token in each row).
"""

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from hetjax.data import tokenizer
from hetjax.data.array_file import ArrayFile
from hetjax.data.chat.conversations import RowEncoder
from hetjax.data.hugging_face import TOKENIZER, ModelTokenizer
from hetjax.data.settings import VALIDATION
from hetjax.data.sources.corpus import Source
from hetjax.data.sources.readers import recognised
from hetjax.data.sources.rows import Completion, Conversation, Row, canonical
from hetjax.data.splitting import (
    Outline,
    Split,
    cut_tail,
    in_hash_order,
    outline,
    split,
)
from hetjax.data.tokenizer import Tokenizer
from hetjax.errors import BadInput, counted_noun

_SAMPLE_CHARS = 4_000_000  # to train a tokenizer on
_LONG_BYTES = 10_000_000  # texts from this size on show progress


Progress = Callable[[str], None]  # receives a line for each phase of a build


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources to train on, and the one to validate with (None: a part of each)."""

    train: tuple[Source, ...]
    validation: Source | None = None


def file_name(split: str, number: int) -> str:
    """Return the stem of the files for a split of the source with this number."""
    return f"{split}_{number}" if number else split


def build(
    directory: Path,
    sources: Sources,
    theirs: ModelTokenizer | None,
    vocab_size: int,
    progress: Progress,
    doing: Progress,
) -> dict[str, Any]:
    """Write the token files of both splits, and a tokenizer unless `theirs` is given.

    Returns what the files hold, as JSON data by split.
    """
    report = _Timed(progress)
    doing("reading " + " and ".join(source.name for source in sources.train))
    parts = _parts(sources)
    found = [part.found for part in dict.fromkeys(parts.values())]
    total_bytes = sum(int(one.bytes_D.sum()) for one in found)
    num_rows = sum(len(one.bytes_D) for one in found)
    kind = "documents" if all(one.is_text for one in found) else "rows"
    names = " and ".join(one.name for one in found)
    number = counted_noun(num_rows, kind.removesuffix("s"))
    report(f"data: {number}, {total_bytes / 1e6:.2f} MB of {names}")
    for line in _about(sources, parts):
        progress(line)
    if theirs is None:
        doing("training the tokenizer")
        theirs = ModelTokenizer(
            ids=trained_tokenizer(
                [part for name, part in parts.items() if name.startswith("train")],
                vocab_size,
            ),
            template=None,
        )
        report(f"data: tokenizer with {theirs.ids.vocab_size} tokens")
        tokenizer.save(theirs.ids, directory / TOKENIZER)
    done = _Percent(doing, total_bytes)
    counts = {
        name: _write(directory / f"{name}.npy", part, name, theirs, done)
        for name, part in parts.items()
    }
    report(f"data: {sum(c.num_tokens for c in counts.values()):,} tokens")
    made = {
        "tokens": {name: c.num_tokens for name, c in counts.items()},
        "bytes": {name: c.num_bytes for name, c in counts.items()},
        kind: {name: c.num_rows for name, c in counts.items()},
        "duplicates": sum(one.num_duplicates for one in found),
    }
    if kind == "rows":
        made["learnt"] = {name: c.num_learnt for name, c in counts.items()}
    return made


def _about(sources: Sources, parts: Mapping[str, "Parts"]) -> Iterator[str]:
    """Yield lines on how rows were recognised, and on rows that are not trained on."""
    every = [*sources.train]
    if sources.validation is not None:
        every.append(sources.validation)
    for source in every:
        for line in recognised(source.seen):
            yield f"data: {source.name}: {line}"
    for one in dict.fromkeys(parts.values()):
        found, kind = one.found, "texts" if one.found.is_text else "rows"
        if found.num_duplicates:
            total = found.num_duplicates + len(found.bytes_D)
            yield (
                f"data: {found.name}: {found.num_duplicates} of {total} {kind} are "
                "duplicates and are left out"
            )
    if sources.validation is None:
        aside, total = (
            sum(one) for one in zip(*map(_aside, parts.values()), strict=True)
        )
        yield (
            f"data: {aside / total:.1%} of the text is held out for validation; "
            f"{VALIDATION} takes other text"
        )


def _aside(part: "Parts") -> tuple[float, int]:
    """Return the number of bytes that are held out, and that of all bytes."""
    bytes_D, cut = part.found.bytes_D, part.split.cut
    aside = sum(int(bytes_D[index]) for index in part.split.aside)
    return aside + (0 if cut is None else cut[1] * int(bytes_D[cut[0]])), int(
        bytes_D.sum()
    )


class _Timed:
    """Reports what was done, with the time since the previous report."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._began_s = progress, time.monotonic()

    def __call__(self, line: str) -> None:
        began_s, self._began_s = self._began_s, time.monotonic()
        self._progress(f"{line} in {self._began_s - began_s:.1f} s")


class _Percent:
    """Reports how much of the text has been turned into tokens: each tenth once."""

    def __init__(self, doing: Progress, total_bytes: int) -> None:
        self._doing, self._total, self._done = doing, total_bytes, 0
        doing("turning the text into tokens")

    def __call__(self, num_bytes: int) -> None:
        before = self._done
        self._done += num_bytes
        if self._total < _LONG_BYTES:
            return
        if self._done * 10 // self._total > before * 10 // self._total:
            percent = self._done * 100 // self._total
            self._doing(f"turning the text into tokens: {percent} %")


def _parts(sources: Sources) -> dict[str, "Parts"]:
    """Return parts by file name; without a validation source, each has both splits."""
    is_split = sources.validation is None
    outlines = [(train, _outline(train, is_split)) for train in sources.train]
    made: dict[str, Parts] = {}
    if sources.validation is None:
        for number, (train, found) in enumerate(outlines):
            both = parts_of(train, found, split(found))
            made |= {file_name(of, number): both for of in ("train", "validation")}
        return made
    other = sources.validation
    other_found = _outline(other, is_split=False)
    train, found = outlines[0]
    if len(outlines) == 1 and other_found.is_text != found.is_text:
        raise BadInput(
            got=f"{train.name} and {other.name}: one holds texts, the other rows with "
            "a prompt or messages",
            allowed="rows of the same kind for training and validation",
            fix="give another --data.validation, or leave it out",
        )
    everything = frozenset(range(len(other_found.bytes_D)))
    for number, (train, found) in enumerate(outlines):
        whole = parts_of(train, found, Split(aside=frozenset()))
        made[file_name("train", number)] = whole
    return made | {"validation": parts_of(other, other_found, Split(aside=everything))}


def _outline(source: Source, is_split: bool) -> Outline:
    rows = source.rows()
    return outline(source.name, rows, option=source.option, is_split=is_split)


def _write(
    path: Path,
    part: "Parts",
    name: str,
    theirs: ModelTokenizer,
    done_bytes: Callable[[int], None],
) -> "Counts":
    rows: Iterator[Any] = part.rows(is_aside=name.startswith("validation"))
    if part.found.is_text:
        return write_documents(path, rows, theirs.ids, done_bytes)
    encoder = RowEncoder(theirs.ids, theirs.template)
    counts = write_rows(path, rows, encoder, done_bytes)
    if not counts.num_learnt:
        raise _nothing_to_learn(part.source, name)
    return counts


def _nothing_to_learn(source: Source, name: str) -> BadInput:
    split = "train" if name.startswith("train") else "validation"
    return BadInput(
        got=f"{source.name}, whose {split} split has no answer to learn",
        allowed="conversations with messages of the role assistant, which are learnt",
        fix=f"give other rows with {source.option}"
        + ("" if split == "train" else f", or validation rows with {VALIDATION}"),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parts:
    """A source, and the use of each of its distinct rows."""

    source: Source
    found: Outline
    split: Split
    cut: tuple[str, str] | None = None  # head and tail of the document that is cut

    def rows(self, is_aside: bool) -> Iterator[Row]:
        """Read the source again, and yield the rows of one side."""
        at = None if self.split.cut is None else self.split.cut[0]
        for index, row in enumerate(self.found.distinct(self.source.rows())):
            if index == at:
                assert self.cut is not None
                row = self.cut[is_aside]
                if row:
                    yield row
            elif (index in self.split.aside) == is_aside:
                yield row


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What a token file holds; bytes are those of the learnt text."""

    num_rows: int
    num_tokens: int
    num_learnt: int
    num_bytes: int


def parts_of(source: Source, found: Outline, split: Split) -> Parts:
    """Return the parts of a source; reads the document that is to be cut, if any."""
    if split.cut is None:
        return Parts(source=source, found=found, split=split)
    index, share = split.cut
    (text,) = _chosen(source, found, {index})
    return Parts(source=source, found=found, split=split, cut=cut_tail(text, share))


def trained_tokenizer(parts: Sequence[Parts], vocab_size: int) -> Tokenizer:
    """Train a tokenizer on training documents, equally many characters per source."""
    chars = _SAMPLE_CHARS // max(1, len(parts))
    documents = chain.from_iterable(_sample(part, chars) for part in parts)
    return tokenizer.train(documents, vocab_size)


def _sample(parts: Parts, max_chars: int) -> Iterator[str]:
    """Yield training documents in the order of their hashes, up to `max_chars`."""
    wanted, num_chars = set[int](), 0
    at = None if parts.split.cut is None else parts.split.cut[0]
    for index in parts.found.by_hash_D.tolist():
        if num_chars >= max_chars:
            break
        if index not in parts.split.aside and index != at:
            wanted.add(index)
            num_chars += int(parts.found.chars_D[index])
    chosen = map(_text, _chosen(parts.source, parts.found, wanted))
    head = [parts.cut[0]] if parts.cut is not None and parts.cut[0] else []
    documents = in_hash_order([*chosen, *head])
    return tokenizer.sample(documents, max_chars)


def write_documents(
    path: Path,
    documents: Iterable[str],
    ids: Tokenizer,
    done_bytes: Callable[[int], None],
) -> Counts:
    """Write tokens_T; `done_bytes` is called for each document as it is read."""
    num_rows, num_bytes = 0, 0

    def counted() -> Iterator[str]:
        nonlocal num_rows, num_bytes
        for text in documents:
            num_rows += 1
            size = len(text.encode())
            num_bytes += size
            done_bytes(size)
            yield text

    with ArrayFile(path, ids.dtype) as file:
        for tokens_T in ids.document_tokens(counted()):
            file.append(tokens_T)
    return Counts(
        num_rows=num_rows,
        num_tokens=file.length,
        num_learnt=file.length,
        num_bytes=num_bytes,
    )


def write_rows(
    path: Path,
    rows: Iterable[Completion | Conversation],
    encoder: RowEncoder,
    done_bytes: Callable[[int], None],
) -> Counts:
    """Write tokens_T, where rows start, and which tokens are learnt."""
    starts, first, num_bytes, num_learnt = array("q", [0]), array("q"), 0, 0
    stem = path.with_suffix("")
    with ExitStack() as stack:
        tokens = stack.enter_context(ArrayFile(path, encoder.ids.dtype))
        learnt = stack.enter_context(ArrayFile(Path(f"{stem}_learnt.npy"), np.bool_))
        for row in encoder.encoded(rows, done_bytes):
            tokens.append(np.array(row.tokens, encoder.ids.dtype))
            learnt.append(np.array(row.learnt, np.bool_))
            starts.append(tokens.length)
            first.append(row.learnt.index(True, 1))
            num_bytes += row.num_bytes
            num_learnt += sum(row.learnt[1:])  # the first token follows nothing
    for name, places in ("starts", starts), ("first", first):
        with ArrayFile(Path(f"{stem}_{name}.npy"), np.int64) as file:
            file.append(np.array(places, np.int64))
    return Counts(
        num_rows=len(starts) - 1,
        num_tokens=tokens.length,
        num_learnt=num_learnt,
        num_bytes=num_bytes,
    )


def _text(row: Row) -> str:
    """Return the text that a tokenizer learns from.

    Conversations are refused later: they need a tokenizer with a template.
    """
    return (
        row.prompt + row.completion if isinstance(row, Completion) else canonical(row)
    )


def _chosen(source: Source, found: Outline, wanted: set[int]) -> list[Any]:
    if not wanted:
        return []
    distinct = enumerate(found.distinct(source.rows()))
    return [row for index, row in distinct if index in wanted]
