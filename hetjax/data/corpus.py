# SPDX-License-Identifier: Apache-2.0
"""The documents that a run learns from, and their split into train and validation.

Owns the two sources, the offline corpus (the manual that is already installed: the
language reference and the docstrings of the standard library, jax, numpy, scipy, flax,
optax and orbax) and a user's text files, plus deduplication and the split. Does not own
tokens (`tokenizer.py`), the cache on disk (`dataset.py`) nor how docstrings are found
(`docstrings.py`).
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from hetjax.data.docstrings import SURROGATE, docstrings
from hetjax.errors import BadInput

# Import name -> distribution that carries its version.
_PACKAGES = {
    "numpy": "numpy",
    "scipy": "scipy",
    "jax": "jax",
    "flax": "flax",
    "optax": "optax",
    "orbax": "orbax-checkpoint",
}
_SKIPPED_FOLDERS = frozenset(
    "test tests testing vendor _vendor third_party idlelib lib2to3 ensurepip "
    "site-packages dist-packages __pycache__".split()
)
_SUFFIXES = (".txt", ".jsonl")
_ALLOWED = "a UTF-8 .txt file, a .jsonl file, or a folder of such files"
_DOCUMENT_BREAK = re.compile(r"\n(?:[ \t]*\n){2,}")
_MIN_VALIDATION_BYTES = 100_000
_CUT_SEARCH_CHARS = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where documents come from.

    `identity` is JSON data that changes whenever the documents may change;
    `documents` yields them in a deterministic order, duplicates included.
    """

    name: str
    identity: Mapping[str, Any]
    documents: Callable[[], Iterator[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Documents to learn from and documents kept aside, no text in both."""

    train: tuple[str, ...]
    validation: tuple[str, ...]


def offline() -> Source:
    """Describe the corpus that needs no download and follows installed versions."""
    versions = {d: importlib.metadata.version(d) for d in _PACKAGES.values()}
    packages = {"python": platform.python_version(), **versions}
    return Source(
        name="the offline corpus",
        identity={"kind": "offline", "packages": packages},
        documents=offline_documents,
    )


def files(path: Path) -> Source:
    """Describe a user's text: one file, or a folder of files in sorted order.

    Two or more blank lines part the documents of a `.txt` file; each line of a
    `.jsonl` file is a document, in its field `text`. Raises BadInput for a missing
    path, another suffix or an unreadable file.
    """
    try:
        members = text_files(path)
        root = path if path.is_dir() else path.parent
        listing = [
            {"name": m.relative_to(root).as_posix(), "sha256": content_hash(m)}
            for m in members
        ]
    except OSError as error:
        raise BadInput(
            got=f"{error.filename or path} cannot be read ({error.strerror})",
            allowed=_ALLOWED,
            fix="make it readable (chmod u+r FILE) or choose another --data.path",
        ) from error
    return Source(
        name=str(path),
        identity={"kind": "files", "files": listing},
        documents=lambda: chain.from_iterable(map(_documents, members)),
    )


def read(source: Source) -> tuple[list[str], int]:
    """Give the source's distinct documents in order, and how many duplicates it had.

    Raises BadInput where there is not enough text to split (two characters).
    """
    distinct: dict[bytes, str] = {}
    num_read = 0
    for text in source.documents():
        if text.strip():
            num_read += 1
            distinct.setdefault(_digest(text), text)
    documents = list(distinct.values())
    if sum(map(len, documents)) < 2:
        raise BadInput(
            got=f"{source.name} holds no text ({len(documents)} documents)",
            allowed="at least two characters of text that is not blank",
            fix="point --data.path at a file with text, or leave it out",
        )
    return documents, num_read - len(documents)


def split(documents: Sequence[str]) -> Split:
    """Set about 1 % of the bytes aside, chosen by document hash.

    Small texts give more, 100 kB but at most 10 %, so that some validation windows
    exist. Where whole documents would miss the target by more than half (one long
    document, say), the tail of the next one is cut off.
    """
    sizes = [len(text.encode()) for text in documents]
    wanted = _validation_bytes(sum(sizes))
    kept: dict[int, str] = dict(enumerate(documents))
    aside: dict[int, str] = {}
    missing = wanted
    for index in sorted(kept, key=lambda i: _digest(documents[i])):
        if sizes[index] > missing:
            if missing > wanted // 2:
                head, tail = _cut_tail(documents[index], missing / sizes[index])
                kept[index], aside[index] = head, tail
            break
        aside[index] = kept.pop(index)
        missing -= sizes[index]
    return Split(
        train=tuple(text for text in kept.values() if text),
        validation=tuple(aside[index] for index in sorted(aside)),
    )


def content_hash(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def by_hash(documents: Iterable[str]) -> list[str]:
    """Put documents in an order that is fixed and unrelated to their place."""
    return sorted(documents, key=_digest)


def offline_documents() -> Iterator[str]:
    """Yield the offline corpus: language reference, then docstrings, file by file."""
    yield from (text for _, text in sorted(topics.items()))
    yield from docstrings([p for root in _offline_roots() for p in _python_files(root)])


def _offline_roots() -> list[Path]:
    roots = [Path(sysconfig.get_path("stdlib"))]
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations, package
        roots.append(Path(next(iter(spec.submodule_search_locations))))
    return roots


def _python_files(root: Path) -> list[Path]:
    relative = [path.relative_to(root) for path in root.rglob("*.py")]
    wanted = [r for r in relative if not _SKIPPED_FOLDERS.intersection(r.parts)]
    return [root / r for r in sorted(wanted, key=Path.as_posix)]


def text_files(path: Path) -> list[Path]:
    """Return the files of a user's text, in order; BadInput if there are none."""
    if path.is_dir():
        return _folder_members(path)
    if not path.exists():
        raise BadInput(
            got=f"no file or folder at {path}",
            allowed=_ALLOWED,
            fix="correct --data.path, or leave it out for the offline corpus",
        )
    if path.suffix.lower() not in _SUFFIXES:
        raise BadInput(
            got=f"{path} has the suffix {path.suffix!r}",
            allowed=_ALLOWED,
            fix=f"if it is plain text: mv {path} {path.with_suffix('.txt')}",
        )
    return [path]


def _folder_members(folder: Path) -> list[Path]:
    relative = sorted(
        (p.relative_to(folder) for p in folder.rglob("*") if p.is_file()),
        key=Path.as_posix,
    )
    visible = [r for r in relative if not any(part[0] == "." for part in r.parts)]
    members = [folder / r for r in visible if r.suffix.lower() in _SUFFIXES]
    if not members:
        raise BadInput(
            got=f"folder {folder} holds no .txt or .jsonl file "
            f"({len(visible)} other files)",
            allowed=_ALLOWED,
            fix="point --data.path at a folder with text files",
        )
    others = [r.as_posix() for r in visible if r.suffix.lower() not in _SUFFIXES]
    if others:
        message = f"{folder}: {len(others)} files that are neither .txt nor .jsonl"
        warnings.warn(f"{message} are left out, {others[0]} first", stacklevel=2)
    return members


def _documents(path: Path) -> Iterator[str]:
    if path.suffix.lower() != ".jsonl":
        text = _decode(path.read_bytes(), str(path)).replace("\r\n", "\n")
        yield from (piece.strip("\n") for piece in _DOCUMENT_BREAK.split(text))
        return
    with path.open("rb") as file:  # bytes part at \n only, str at U+2028 too
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path} line {number}"
                yield _text_field(_decode(line, where), where)


def _text_field(line: str, where: str) -> str:
    try:
        record = json.loads(line.strip())
    except json.JSONDecodeError as error:
        what = f"{error.msg} at column {error.colno}"
        raise _bad_record(f"{where} is not JSON: {what}") from error
    except (ValueError, RecursionError) as error:  # endless digits, endless depth
        raise _bad_record(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise _bad_record(f"{where} is a {type(record).__name__}, not an object")
    if "text" not in record:
        fields = ", ".join(map(repr, record)) or "none"
        raise _bad_record(f"{where} has no field 'text' (its fields: {fields})")
    text = record["text"]
    if not isinstance(text, str):
        raise _bad_record(
            f"{where} holds {type(text).__name__} in 'text', not a string"
        )
    if SURROGATE.search(text):
        raise _bad_record(f"{where} has half a surrogate pair, which is no character")
    return text


def _bad_record(got: str) -> BadInput:
    return BadInput(
        got=got,
        allowed='one JSON object per line with a string field "text"',
        fix='mend or delete the line; a good one is {"text": "Once upon a time"}',
    )


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        bad = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
        raise BadInput(
            got=f"{where} is not UTF-8 ({bad})",
            allowed="text encoded as UTF-8",
            fix="convert the file, e.g. iconv -f LATIN1 -t UTF-8 OLD > NEW",
        ) from error


def _validation_bytes(total_bytes: int) -> int:
    wanted = max(total_bytes // 100, _MIN_VALIDATION_BYTES)
    return max(1, min(wanted, total_bytes // 10))


def _cut_tail(text: str, share: float) -> tuple[str, str]:
    """Part off a tail of about `share` of the text, at a line if one is near."""
    at = len(text) - max(1, round(share * len(text)))
    line = text.rfind("\n", max(0, at - _CUT_SEARCH_CHARS), at) + 1
    at = line or at
    return text[:at], text[at:]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
