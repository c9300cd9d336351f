# SPDX-License-Identifier: Apache-2.0
"""Reads the rows of a user's files, one after the other.

Owns which files are read and in which order, the documents of texts, and the report on
a source's rows. Does not own how records are stored in files (`record_files.py`), what
a row may be (`rows.py`) nor what becomes of rows (`corpus.py`).
"""

import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from hetjax.data.sources.forms import FormsSeen
from hetjax.data.sources.record_files import decoded, opened, records
from hetjax.data.sources.rows import Completion, Conversation, Row, row_of
from hetjax.errors import BadInput

PATH = "--data.path"  # the option that most texts come from
ALLOWED = (
    "a UTF-8 .txt file, a .jsonl, .json, .csv or .parquet file, each but the last "
    "also as .gz or .zst, or a folder of such files"
)
_TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
_PACKED = (".gz", ".zst")
_TEXTS = (".txt", *(f".txt{packed}" for packed in _PACKED))
_SUFFIXES = (
    *_TEXTS,
    *_TABLES,
    *(kind + packed for kind in _TABLES for packed in _PACKED),
    ".parquet",
)
_SYNTAX = (".yaml", ".yml", ".toml", ".xml", ".html", ".htm", ".ipynb", ".tex")
_LOOK_BYTES = 4_096
_BLANK = re.compile(r"[ \t]*\n")
_SHOWN_CHARS = 60
_SHOWN_MESSAGES = 4


def text_files(path: Path, option: str = PATH) -> list[Path]:
    """Return the files of a user's text, in order; BadInput if there are none.

    `option` is the option that gave the path.
    """
    if path.is_dir():
        return _folder_members(path, option)
    if not path.exists():
        raise BadInput(
            got=f"no file or folder at {path}",
            allowed=ALLOWED,
            fix=f"correct {option}"
            + (", or leave it out for the offline corpus" if option == PATH else ""),
        )
    if not path.is_file():
        raise BadInput(
            got=f"{path} is a pipe or a device",
            allowed=ALLOWED + "; it is read more than once",
            fix=f"write its output to a file, and give that to {option}",
        )
    if _kind(path) is None:
        raise BadInput(
            got=f"{path} has the suffix {path.suffix!r}",
            allowed=ALLOWED,
            fix=_advice(path),
        )
    return [path]


def rows(
    path: Path, column: str, format: str | None = None, seen: FormsSeen | None = None
) -> Iterator[Row]:
    """Yield the rows of a file; of a `.txt` file its documents, whatever the column.

    Two or more blank lines separate documents. BadInput names the line or row.
    """
    kind = _kind(path)
    assert kind is not None, path
    if kind in _TEXTS:
        with opened(path) as file:
            for text in documents(_lines(file, str(path))):
                if seen is not None and seen.first is None:
                    seen.first = text
                yield text
        return
    for where, record in records(path, kind, column, format, seen):
        yield row_of(record, column, where, format=format, seen=seen)


def first_row(members: Iterable[Path], column: str, format: str | None) -> Row:
    """Return the first row of all files, or an empty text if that is in a text file."""
    for member in members:
        if _kind(member) in _TEXTS:
            return ""
        for row in rows(member, column, format):
            return row
    return ""


def documents(lines: Iterable[str]) -> Iterator[str]:
    """Join lines to documents, which two or more blank lines separate."""
    held: list[str] = []
    num_blank = 0
    for line in lines:
        is_blank = _BLANK.fullmatch(line) is not None
        if num_blank >= 2 and not is_blank:
            yield "".join(held[:-num_blank]).strip("\n")
            held = []
        # a blank first line ends no document, so it does not count
        num_blank = num_blank + 1 if is_blank and held else 0
        held.append(line)
    yield "".join(held[:-num_blank] if num_blank >= 2 else held).strip("\n")


def recognised(seen: FormsSeen) -> list[str]:
    """Return lines with the forms of rows, the first row, and the unused fields."""
    lines = []
    if seen.forms:
        kinds = " and ".join(f"{kind} in {key!r}" for kind, key in seen.forms.items())
        lines.append(f"rows: {kinds}; the first: {_shown(seen.first)}")
    if seen.unused:
        names = ", ".join(map(repr, seen.unused))
        lines.append(f"rows: not used: {names}")
    return lines


def _shown(row: Row | None) -> str:
    if isinstance(row, Conversation):
        found = [
            f"{message['role']} {_short(message.get('content'))}"
            for message in row.messages[:_SHOWN_MESSAGES]
        ]
        more = len(row.messages) - len(found)
        return ", ".join(found) + (f" and {more} more" if more else "")
    if isinstance(row, Completion):
        return f"after {_short(row.prompt)} comes {_short(row.completion)}"
    return _short(row)


def _short(text: object) -> str:
    shown = "" if text is None else str(text)
    if len(shown) > _SHOWN_CHARS:
        return repr(shown[:_SHOWN_CHARS])[:-1] + "...'"
    return repr(shown)


def _lines(file: Iterable[bytes], where: str) -> Iterator[str]:
    offset = 0
    for raw in file:
        text = decoded(raw, where, offset)
        offset += len(raw)
        yield text.replace("\r\n", "\n")


def _kind(path: Path) -> str | None:
    """Return the known suffix of a file (double if compressed), None for another."""
    name = path.name.lower()
    found = [suffix for suffix in _SUFFIXES if name.endswith(suffix)]
    return max(found, key=len, default=None)


def _advice(path: Path) -> str:
    """Return what to do with another file: never train on the syntax of a format."""
    with path.open("rb") as file:
        start = file.read(_LOOK_BYTES)
    text = start.decode("utf-8", errors="ignore").lstrip("\ufeff \t\r\n")
    is_text = b"\0" not in start and len(text.encode()) >= len(start.strip()) - 3
    is_syntax = path.suffix.lower() in (*_SYNTAX, *_PACKED) or text[:1] in ("{", "[")
    if is_text and not is_syntax and not text.startswith("<"):
        return f"if it is plain text: mv {path} {path.with_suffix('.txt')}"
    if text[:1] in ("{", "["):
        return f"if it is JSON: mv {path} {path.with_suffix('.json')}"
    return 'write its text to a .txt file, or to a .jsonl file of {"text": ...} rows'


def _folder_members(folder: Path, option: str) -> list[Path]:
    relative = sorted(
        (p.relative_to(folder) for p in folder.rglob("*") if p.is_file()),
        key=Path.as_posix,
    )
    visible = [r for r in relative if not any(part[0] == "." for part in r.parts)]
    members = [folder / r for r in visible if _kind(r) is not None]
    if not members:
        raise BadInput(
            got=f"folder {folder} holds no file of text or rows "
            f"({len(visible)} other files)",
            allowed=ALLOWED,
            fix=f"point {option} at a folder with text files",
        )
    others = [r.as_posix() for r in visible if _kind(r) is None]
    if others:
        message = f"{folder}: {len(others)} files of other types are left out"
        warnings.warn(f"{message}; the first: {others[0]}", stacklevel=2)
    return members
