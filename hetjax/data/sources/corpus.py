# SPDX-License-Identifier: Apache-2.0
"""Defines the sources of the rows that a run learns from.

Owns the two sources: the offline corpus (documentation that is already installed: the
language reference and the docstrings of the standard library, jax, numpy, scipy, flax,
optax and orbax) and a user's files. Does not own how files are read (`readers.py`) and
split (`splitting.py`), tokens (`tokenizer.py`), the cache on disk (`dataset.py`) nor
how docstrings are found (`docstrings.py`).
"""

import hashlib
import importlib.metadata
import importlib.util
import platform
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from hetjax.data.sources.docstrings import docstrings
from hetjax.data.sources.forms import TEXT_COLUMN, Format, FormsSeen
from hetjax.data.sources.readers import ALLOWED, PATH, first_row, rows, text_files
from hetjax.data.sources.rows import Row
from hetjax.errors import BadInput
from hetjax.files.reading import opened

# Import name -> distribution that carries its version.
_PACKAGES = {
    "numpy": "numpy",
    "scipy": "scipy",
    "jax": "jax",
    "flax": "flax",
    "optax": "optax",
    "orbax": "orbax-checkpoint",
}
# Increase it when the same rows, other than plain texts, become other tokens
_READING = 2
_SKIPPED_FOLDERS = frozenset(
    "test tests testing vendor _vendor third_party idlelib lib2to3 ensurepip "
    "site-packages dist-packages __pycache__".split()
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where rows come from.

    `identity` is JSON data that changes whenever the rows may change. `rows` yields
    them in a deterministic order, duplicates included, as often as it is called.
    `option` is the option that gave the source, `seen` what the last reading found.
    """

    name: str
    identity: Mapping[str, Any]
    rows: Callable[[], Iterator[Row]]
    option: str = PATH
    seen: FormsSeen = field(default_factory=FormsSeen)


def offline() -> Source:
    """Describe the corpus that needs no download and follows installed versions."""
    versions = {d: importlib.metadata.version(d) for d in _PACKAGES.values()}
    packages = {"python": platform.python_version(), **versions}
    # found once: the search for docstrings takes longer than all work on them
    found = cache(lambda: list(offline_documents()))
    return Source(
        name="the offline corpus",
        identity={"kind": "offline", "packages": packages},
        rows=lambda: iter(found()),
    )


def files(
    path: Path,
    column: str = TEXT_COLUMN,
    option: str = PATH,
    *,
    format: Format | None = None,
) -> Source:
    """Describe a user's data: one file, or a folder of files in sorted order.

    Raises BadInput for a missing path, an unknown suffix, an unreadable file or a bad
    first row.
    """
    try:
        members = text_files(path, option)
        root = path if path.is_dir() else path.parent
        listing = [
            {"name": m.relative_to(root).as_posix(), "sha256": content_hash(m)}
            for m in members
        ]
    except OSError as error:
        raise _unreadable(path, error, option) from error
    named: dict[str, Any] = {} if column == TEXT_COLUMN else {"column": column}
    if format is not None:
        named["format"] = format
    if not isinstance(first_row(members, column, format), str):
        named["reading"] = _READING
    seen = FormsSeen()

    def read() -> Iterator[Row]:
        return chain.from_iterable(
            rows(member, column, format, seen) for member in members
        )

    return Source(
        name=str(path),
        identity={"kind": "files", "files": listing, **named},
        rows=read,
        option=option,
        seen=seen,
    )


def holds_rows(
    path: Path, column: str, option: str, format: Format | None = None
) -> bool:
    """Whether the first row has a prompt or messages; raises as `files` does."""
    try:
        members = text_files(path, option)
        return not isinstance(first_row(members, column, format), str)
    except OSError as error:
        raise _unreadable(path, error, option) from error


def _unreadable(path: Path, error: OSError, option: str) -> BadInput:
    return BadInput(
        got=f"{error.filename or path} cannot be read ({error.strerror})",
        allowed=ALLOWED,
        fix=f"make it readable (chmod u+r FILE) or choose another {option}",
    )


def content_hash(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with opened(path, what="text") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
