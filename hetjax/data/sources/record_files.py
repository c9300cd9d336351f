# SPDX-License-Identifier: Apache-2.0
"""Reads the records of JSON Lines, JSON, CSV and Parquet files, one after the other.

Owns how these files are opened, decompressed, decoded and split into records; only one
record and one read buffer of a file are in memory. Does not own which records are rows
(`rows.py`) nor which files are read (`readers.py`).
"""

import csv
import gzip
import io
import json
import zlib
from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

from hetjax.data.sources.forms import (
    EXTRAS,
    KNOWN,
    FormsSeen,
    bad_row,
    form_of_fields,
    no_form,
    not_json,
)
from hetjax.errors import BadInput, counted_noun
from hetjax.files.parsing import Malformed, json_value
from hetjax.files.reading import opened as plain_file

_PARQUET_ROWS = 1_000  # decoded at a time
_READ_BYTES = 1 << 20
_MOST_BYTES = 1 << 28  # of one record
_WINDOW_BYTES = 1 << 27  # of a .zst file: what `zstd --long` makes by default
_JSON_BLANK = " \t\r\n"

Record = tuple[str, Any]  # its place, for errors, and its value


def records(
    path: Path, kind: str, column: str, format: str | None, seen: FormsSeen | None
) -> Iterator[Record]:
    """Yield the records of a file, read as one with the suffix `kind`."""
    if kind == ".parquet":
        yield from _parquet_records(path, column, format, seen)
        return
    with opened(path) as file:
        if kind.startswith((".jsonl", ".ndjson")):
            yield from _json_lines(file, path)
        elif kind.startswith(".json"):
            yield from _json_values(file, path)
        else:
            delimiter = "\t" if kind.startswith(".tsv") else ","
            yield from _csv_records(file, path, column, delimiter)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for its bytes, decompressed; BadInput if it is damaged."""
    with plain_file(path) as file:
        start = file.read(4)
        file.seek(0)
        _check_encoding(start, path)
        if path.suffix.lower() == ".gz":
            broken, inner = (gzip.BadGzipFile, EOFError, zlib.error), gzip.open(file)
        elif path.suffix.lower() == ".zst":
            broken, inner = _zstandard(file, path)
        else:
            yield file
            return
        try:
            yield cast(BinaryIO, inner)
        except broken as error:
            raise BadInput(
                got=f"{path} cannot be decompressed ({error})",
                allowed="a whole .gz or .zst file",
                fix="write or fetch the file again",
            ) from error


def _zstandard(file: BinaryIO, path: Path) -> tuple[Any, BinaryIO]:
    try:
        zstandard: Any = import_module("zstandard")
    except ImportError as error:
        raise BadInput(
            got=f"{path}, but zstandard is not installed",
            allowed=".zst files if zstandard is installed on every machine",
            fix="pip install 'hetjax[zst]'",
        ) from error
    made = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
    inner = made.stream_reader(file, read_across_frames=True)
    return zstandard.ZstdError, cast(BinaryIO, io.BufferedReader(inner))


def decoded(raw: bytes, where: str, offset: int = 0) -> str:
    """Return the text of UTF-8 bytes that begin at this offset; BadInput for others."""
    try:
        return raw.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(error, where, offset) from error


def _not_utf8(error: UnicodeDecodeError, where: str, offset: int) -> BadInput:
    place = offset + error.start
    bad = f"byte 0x{error.object[error.start]:02x} at offset {place}"
    return BadInput(
        got=f"{where} is not UTF-8 ({bad})",
        allowed="text encoded as UTF-8",
        fix="convert the file, e.g. iconv -f LATIN1 -t UTF-8 OLD > NEW",
    )


def _check_encoding(start: bytes, path: Path) -> None:
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise BadInput(
            got=f"{path} is UTF-16",
            allowed="text encoded as UTF-8",
            fix="convert the file: iconv -f UTF-16 -t UTF-8 OLD > NEW",
        )


def _json_lines(file: BinaryIO, path: Path) -> Iterator[Record]:
    number = 0
    while line := file.readline(_MOST_BYTES + 1):  # bytes split at \n only
        number += 1
        where = f"{path} line {number}"
        _check_size(len(line), where)
        if line.strip():
            yield where, _json(decoded(line, where), where)


def _json(text: str, where: str) -> Any:
    try:
        return json_value(text.strip(), finite=False)
    except Malformed as error:
        raise not_json(where, error) from error


def _json_values(file: BinaryIO, path: Path) -> Iterator[Record]:
    """Yield the items of an array, or of consecutive values as in JSON Lines."""
    text = _JsonText(file, path)
    is_array = text.skipped("[")
    number = 0
    while not text.is_over(is_array):
        number += 1
        yield f"{path} row {number}", text.value(f"{path} row {number}")
        if is_array and not text.skipped(","):
            text.expect_end(f"{path} row {number}")
            return


class _JsonText:
    """A file of JSON that is read value by value."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._decode = getincrementaldecoder("utf-8-sig")()
        self._decoder = json.JSONDecoder()
        self._text, self._at, self._offset = "", 0, 0
        self._is_read = False

    def skipped(self, sign: str) -> bool:
        """Skip this sign if it comes next; return whether it did."""
        if self._next() != sign:
            return False
        self._at += 1
        return True

    def is_over(self, is_array: bool) -> bool:
        """Whether no value follows."""
        if is_array:
            return self.skipped("]") and self._ended()
        return self._ended()

    def expect_end(self, where: str) -> None:
        """Raise BadInput unless the array, and the file, end here."""
        if not (self.skipped("]") and self._ended()):
            row = where.rpartition(" ")[2]
            raise not_json(str(self._path), f"no ',' or ']' after row {row}")

    def value(self, where: str) -> Any:
        """Return the next value; reads more until it is whole."""
        self._next()
        wanted = _READ_BYTES
        while True:
            try:
                _, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._is_read:
                    raise not_json(where, error.msg) from error
            except (ValueError, RecursionError) as error:
                raise not_json(where, error) from error
            else:
                # a number may continue in bytes that are not read yet
                if end < len(self._text) or self._is_read:
                    text, self._at = self._text[self._at : end], end
                    return _json(text, where)
            _check_size(len(self._text) - self._at, where)
            self._read(wanted)
            wanted *= 2

    def _ended(self) -> bool:
        return not self._next()

    def _next(self) -> str:
        """Return the next character that is not blank, or an empty string."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _JSON_BLANK:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if self._is_read:
                return ""
            self._read(_READ_BYTES)

    def _read(self, num_bytes: int) -> None:
        raw = self._file.read(num_bytes)
        self._is_read = len(raw) == 0
        try:
            more = self._decode.decode(raw, self._is_read)
        except UnicodeDecodeError as error:
            raise _not_utf8(error, str(self._path), self._offset) from error
        self._offset += len(raw)
        self._text, self._at = self._text[self._at :] + more, 0


def _csv_records(
    file: BinaryIO, path: Path, column: str, delimiter: str
) -> Iterator[Record]:
    """Yield rows as records whose fields are named in the first line."""
    csv.field_size_limit(_MOST_BYTES)
    lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
        if len({*names}) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise bad_row(f"{path} has two columns named {twice!r}", column)
        for number, values in enumerate(filter(None, reader), 1):
            where = f"{path} row {number}"
            if len(values) != len(names):
                raise _uneven(where, len(values), names, delimiter)
            yield where, dict(zip(names, values, strict=True))
    except csv.Error as error:
        got = f"{path} line {reader.line_num} is not CSV: {error}"
        raise bad_row(got, column) from error
    except UnicodeDecodeError as error:
        raise _not_utf8(error, f"{path} after line {reader.line_num}", 0) from error
    finally:
        lines.detach()


def _uneven(where: str, num: int, names: list[str], delimiter: str) -> BadInput:
    between = {",": "commas", "\t": "tabs"}[delimiter]
    fix = "correct or delete the row"
    if len(names) == 1 and ";" in names[0]:
        fix = f"separate the fields by {between}, not by semicolons"
    return BadInput(
        got=f"{where} has {counted_noun(num, 'field')}, "
        f"but the header has {len(names)}",
        allowed=f"rows with as many fields as the header, separated by {between}",
        fix=fix,
    )


def _check_size(num_bytes: int, where: str) -> None:
    if num_bytes > _MOST_BYTES:
        raise BadInput(
            got=f"{where} has more than {_MOST_BYTES >> 20} MiB",
            allowed=f"rows of up to {_MOST_BYTES >> 20} MiB",
            fix="split the row into several, or give it as .txt",
        )


def _parquet_records(
    path: Path, column: str, format: str | None, seen: FormsSeen | None
) -> Iterator[Record]:
    arrow, parquet = _arrow(path)
    try:
        with plain_file(path) as plain, parquet.ParquetFile(plain) as file:
            names = file.schema_arrow.names
            wanted = _columns(names, column, format, path)
            for name in (name for name in names if name not in wanted):
                if seen is not None:
                    seen.add_unused(name)
            batches = file.iter_batches(_PARQUET_ROWS, columns=wanted)
            found = chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, record in enumerate(found, 1):
                yield f"{path} row {number}", _without_nulls(record)
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if getattr(error, "errno", None) is not None:
            raise  # an error of the system; damage has no errno
        raise BadInput(
            got=f"{path} cannot be read as Parquet ({str(error).splitlines()[0]})",
            allowed="a Parquet file",
            fix="write or fetch the file again",
        ) from error


def _columns(
    names: list[str], column: str, format: str | None, path: Path
) -> list[str]:
    """Return the columns to read: those that a row may be made of, or refused for."""
    form = form_of_fields(names, column, format)
    is_text = form is not None and form.name == "text"
    known = {column, *(EXTRAS if is_text else KNOWN)}
    wanted = [name for name in names if name in known]
    if form is None and not {"chosen", "rejected"} <= {*wanted}:
        raise no_form(names, column, format, str(path), "column")
    return wanted


def _without_nulls(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without the nulls that Parquet puts for absent fields."""
    return {name: _pruned(value) for name, value in record.items()}


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        kept = value.items()
        return {k: _pruned(v) for k, v in kept if v is not None or k == "content"}
    if isinstance(value, list):
        return [_pruned(one) for one in value]
    return value


def _arrow(path: Path) -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise BadInput(
            got=f"{path}, but pyarrow is not installed",
            allowed="Parquet files if pyarrow is installed on every machine",
            fix="pip install 'hetjax[parquet]'",
        ) from error
