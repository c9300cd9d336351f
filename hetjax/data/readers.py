# SPDX-License-Identifier: Apache-2.0
"""The rows of text, JSONL and Parquet files, one after the other.

Owns which files are read, in which order, and their decoding; no more of a file than a
document and the rows beside it is in memory. Does not own what a row may be (`rows.py`)
nor what becomes of rows (`corpus.py`).
"""

import json
import re
import warnings
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from hetjax.data.rows import Row, bad_row, column_of, row_of
from hetjax.errors import BadInput

PATH = "--data.path"  # the option that most texts come from
ALLOWED = "a UTF-8 .txt file, a .jsonl or .parquet file, or a folder of such files"
_SUFFIXES = (".txt", ".jsonl", ".parquet")
_PARQUET_ROWS = 1_000  # decoded at a time
_BLANK = re.compile(r"[ \t]*\n")


def text_files(path: Path, option: str = PATH) -> list[Path]:
    """Return the files of a user's text, in order; BadInput if there are none.

    `option` is where people gave the path.
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
    if path.suffix.lower() not in _SUFFIXES:
        raise BadInput(
            got=f"{path} has the suffix {path.suffix!r}",
            allowed=ALLOWED,
            fix=f"if it is plain text: mv {path} {path.with_suffix('.txt')}",
        )
    return [path]


def rows(path: Path, column: str) -> Iterator[Row]:
    """Yield the rows of a file; of a `.txt` file its documents, whatever the column.

    Two or more blank lines part documents. BadInput names the line or row.
    """
    suffix = path.suffix.lower()
    if suffix == ".txt":
        with path.open("rb") as file:
            yield from documents(_lines(file, str(path)))
    elif suffix == ".jsonl":
        yield from _json_rows(path, column)
    else:
        yield from _parquet_rows(path, column)


def documents(lines: Iterable[str]) -> Iterator[str]:
    """Join lines to the documents that two or more blank lines part."""
    held: list[str] = []
    num_blank = 0
    for line in lines:
        is_blank = _BLANK.fullmatch(line) is not None
        if num_blank >= 2 and not is_blank:
            yield "".join(held[:-num_blank]).strip("\n")
            held = []
        # the first line of all ends nothing, so it is no blank line after one
        num_blank = num_blank + 1 if is_blank and held else 0
        held.append(line)
    yield "".join(held[:-num_blank] if num_blank >= 2 else held).strip("\n")


def _lines(file: Iterable[bytes], where: str) -> Iterator[str]:
    offset = 0
    for raw in file:
        text = decoded(raw, where, offset)
        offset += len(raw)
        yield text.replace("\r\n", "\n")


def _json_rows(path: Path, column: str) -> Iterator[Row]:
    with path.open("rb") as file:  # bytes part at \n only, str at U+2028 too
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path} line {number}"
                record = _json(decoded(line, where), column, where)
                yield row_of(record, column, where)


def _json(line: str, column: str, where: str) -> Any:
    try:
        return json.loads(line.strip())
    except json.JSONDecodeError as error:
        what = f"{error.msg} at column {error.colno}"
        raise bad_row(f"{where} is not JSON: {what}", column) from error
    except (ValueError, RecursionError) as error:  # endless digits, endless depth
        raise bad_row(f"{where} is not JSON: {error}", column) from error


def _parquet_rows(path: Path, column: str) -> Iterator[Row]:
    arrow, parquet = _arrow(path)
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            found = column_of(names, column)
            if found is None:
                fields = ", ".join(map(repr, names)) or "none"
                got = f"{path} has no column {column!r} (its columns: {fields})"
                raise bad_row(got, column)
            wanted = ["prompt", "completion"] if found == "prompt" else [found]
            batches = file.iter_batches(_PARQUET_ROWS, columns=wanted)
            records = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, record in enumerate(records, 1):
                yield row_of(record, column, f"{path} row {number}")
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise BadInput(
            got=f"{path} cannot be read as Parquet ({str(error).splitlines()[0]})",
            allowed=ALLOWED,
            fix="write or fetch the file again",
        ) from error


def _arrow(path: Path) -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise BadInput(
            got=f"{path}, and pyarrow is not installed",
            allowed="Parquet files where pyarrow is installed, on every machine",
            fix="pip install 'hetjax[parquet]'",
        ) from error


def decoded(raw: bytes, where: str, offset: int = 0) -> str:
    try:
        return raw.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        place = offset + error.start
        bad = f"byte 0x{error.object[error.start]:02x} at offset {place}"
        raise BadInput(
            got=f"{where} is not UTF-8 ({bad})",
            allowed="text encoded as UTF-8",
            fix="convert the file, e.g. iconv -f LATIN1 -t UTF-8 OLD > NEW",
        ) from error


def _folder_members(folder: Path, option: str) -> list[Path]:
    relative = sorted(
        (p.relative_to(folder) for p in folder.rglob("*") if p.is_file()),
        key=Path.as_posix,
    )
    visible = [r for r in relative if not any(part[0] == "." for part in r.parts)]
    members = [folder / r for r in visible if r.suffix.lower() in _SUFFIXES]
    if not members:
        raise BadInput(
            got=f"folder {folder} holds no .txt, .jsonl or .parquet file "
            f"({len(visible)} other files)",
            allowed=ALLOWED,
            fix=f"point {option} at a folder with text files",
        )
    others = [r.as_posix() for r in visible if r.suffix.lower() not in _SUFFIXES]
    if others:
        message = f"{folder}: {len(others)} files that are not .txt, .jsonl or .parquet"
        warnings.warn(f"{message} are left out, {others[0]} first", stacklevel=2)
    return members
