# SPDX-License-Identifier: Apache-2.0
"""Splits rows into those to learn from and those kept aside, with no row in both.

Rows are read three times at most and never held. The first reading leaves a hash and
two sizes of each (`Outline`), which decide everything else. Owns deduplication and the
split. Does not own where rows come from (`corpus.py`).

Legend: N rows as they are read, D distinct ones in the same order.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from hetjax.data.settings import VALIDATION
from hetjax.data.sources.readers import PATH
from hetjax.data.sources.rows import Row, canonical
from hetjax.errors import BadInput

_MIN_VALIDATION_BYTES = 100_000
_CUT_SEARCH_CHARS = 1_000
_HASH_BYTES = 16  # of a SHA-256: in the same order, and unique in practice


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outline:
    """The result of one reading of a source: which rows count, and their sizes."""

    name: str
    is_text: bool
    taken_N: np.ndarray  # rows that are neither blank nor duplicates
    hash_D2: np.ndarray  # two halves, the more significant first
    bytes_D: np.ndarray
    chars_D: np.ndarray
    num_duplicates: int

    @property
    def by_hash_D(self) -> np.ndarray:
        """The distinct rows in a fixed order that is unrelated to their place."""
        return _by_hash(self.hash_D2)

    def distinct(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Leave blank rows and duplicates out of another reading of the source."""
        return compress(rows, self.taken_N)


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Which distinct rows are kept aside.

    `cut` is the index of a document of which only the tail is kept aside, and the
    tail's approximate share of that document.
    """

    aside: frozenset[int]
    cut: tuple[int, float] | None = None


def outline(
    name: str, rows: Iterable[Row], *, option: str = PATH, is_split: bool = True
) -> Outline:
    """Read a source once. Raises BadInput if it mixes documents with other rows.

    Also raises it if there are not enough: two characters or two rows if a part is to
    be set aside, else one. `option` is the option that gave the source.
    """
    hashes, num_bytes, num_chars = bytearray(), array("q"), array("q")
    counts = bytearray()
    kinds: set[bool] = set()
    for row in rows:
        text = canonical(row)
        counts.append(bool(text.strip()))
        if counts[-1]:
            raw = text.encode()
            hashes += hashlib.sha256(raw).digest()[:_HASH_BYTES]
            num_bytes.append(len(raw))
            num_chars.append(len(text))
            kinds.add(isinstance(row, str))
    _check_kinds(name, kinds)
    hash_D2 = np.frombuffer(bytes(hashes), ">u8").reshape(-1, 2)
    first = _first_of_equals(hash_D2)
    taken_N = np.frombuffer(counts, np.uint8).astype(bool)
    taken_N[taken_N] = first
    made = Outline(
        name=name,
        is_text=False not in kinds,
        taken_N=taken_N,
        hash_D2=hash_D2[first],
        bytes_D=np.array(num_bytes, np.int64)[first],
        chars_D=np.array(num_chars, np.int64)[first],
        num_duplicates=int(np.sum(~first)),
    )
    _check_enough(made, option, 1 + is_split)
    return made


def split(found: Outline) -> Split:
    """Set about 1 % of the bytes aside, chosen by hash.

    Small sources give more, 100 kB but at most 10 %, so that some validation windows
    exist. If whole documents would miss the target by more than half (one long
    document, say), the tail of the next document is cut off. Other rows stay whole.
    """
    wanted = _validation_bytes(int(found.bytes_D.sum()))
    if not found.is_text:
        return _whole_rows(found, wanted)
    aside: set[int] = set()
    missing = wanted
    for index in found.by_hash_D.tolist():
        size = int(found.bytes_D[index])
        if size > missing:
            cut = (index, missing / size) if missing > wanted // 2 else None
            return Split(aside=frozenset(aside), cut=cut)
        aside.add(index)
        missing -= size
    return Split(aside=frozenset(aside))


def cut_tail(text: str, share: float) -> tuple[str, str]:
    """Split off a tail of about `share` of the text, at a line start if one is near."""
    at = len(text) - max(1, round(share * len(text)))
    line = text.rfind("\n", max(0, at - _CUT_SEARCH_CHARS), at) + 1
    at = line or at
    return text[:at], text[at:]


def in_hash_order(documents: Sequence[str]) -> list[str]:
    """Return documents in the order of their hashes."""
    return sorted(documents, key=lambda text: hashlib.sha256(text.encode()).digest())


def _whole_rows(found: Outline, wanted: int) -> Split:
    """Set whole rows aside: at least one, and not all of them."""
    order_D = found.by_hash_D[:-1]
    before_D = np.cumsum(found.bytes_D[order_D]) - found.bytes_D[order_D]
    return Split(aside=frozenset(order_D[before_D < wanted].tolist()))


def _validation_bytes(total_bytes: int) -> int:
    wanted = max(total_bytes // 100, _MIN_VALIDATION_BYTES)
    return max(1, min(wanted, total_bytes // 10))


def _by_hash(hash_D2: np.ndarray) -> np.ndarray:
    return np.lexsort((hash_D2[:, 1], hash_D2[:, 0]))


def _first_of_equals(hash_D2: np.ndarray) -> np.ndarray:
    """Return whether each row is the first with its hash."""
    order_D = _by_hash(hash_D2)  # stable: of equal rows the first comes first
    is_again_D = np.zeros(len(hash_D2), bool)
    ordered_D2 = hash_D2[order_D]
    is_again_D[order_D[1:]] = np.all(ordered_D2[1:] == ordered_D2[:-1], axis=1)
    return ~is_again_D


def _check_kinds(name: str, kinds: set[bool]) -> None:
    if len(kinds) > 1:
        raise BadInput(
            got=f"{name} holds both texts and rows with a prompt or messages",
            allowed="one of the two kinds in a data set",
            fix="split them into two folders, or name one column with --data.column",
        )


def _check_enough(found: Outline, option: str, least: int) -> None:
    """Raise BadInput unless there are `least` characters, or rows if it is no text."""
    num_rows = len(found.bytes_D)
    if found.is_text and found.chars_D.sum() < least:
        characters = "two characters" if least > 1 else "one character"
        raise BadInput(
            got=f"{found.name} holds no text ({num_rows} documents)",
            allowed=f"at least {characters} of text that is not blank",
            fix=f"point {option} at a file with text, or leave it out",
        )
    if not found.is_text and num_rows < least:
        again = (
            f" and {found.num_duplicates} duplicates" if found.num_duplicates else ""
        )
        raise BadInput(
            got=f"{found.name} holds a single row{again}",
            allowed="at least two different rows, one of them for validation",
            fix=f"point {option} at a file with more rows, or give {VALIDATION}",
        )
