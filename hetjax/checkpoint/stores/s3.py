# SPDX-License-Identifier: Apache-2.0
"""Keeps checkpoints in an S3 bucket, or on a server that speaks S3 (MinIO etc.).

    NAME                          an object; of a file over PIECE_BYTES, its index
    NAME.pieces/00000-0a1b2c3d    its pieces, each with its number and its crc32c

Every object is created by one request that S3 refuses if the object exists
(If-None-Match), so nothing is ever overwritten. obstore's multipart uploads have no
such condition. A single request is limited to 5 GB and is held in memory whole. So
large files are stored in pieces, which are retried one by one. The index comes last:
without it there is no file.

Owns `S3Store`. Its client tries once; retries are ours. Does not own the store
protocol, retries and checks (`store.py`), errors (`s3_errors.py`), the form of an index
(`s3_pieces.py`) nor opening a bucket (`s3_opening.py`).
"""

import base64
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import google_crc32c
import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import S3Store as Client

from hetjax.checkpoint.file_records import FileRecord, record_of_bytes
from hetjax.checkpoint.stores.s3_errors import errors_translated
from hetjax.checkpoint.stores.s3_login import Login
from hetjax.checkpoint.stores.s3_pieces import (
    INDEX,
    PIECE_BYTES,
    index_of,
    metadata,
    piece_name,
    pieces_of,
    record_said,
)
from hetjax.checkpoint.stores.store import (
    SLOWEST_BYTES_PER_S,
    BandwidthLimit,
    CorruptData,
    TransientError,
    check_same,
    check_source,
    receive,
    retry,
    text_of,
)

_CONNECT_S, _LONGEST_S = 20.0, 24 * 3600.0
_T = TypeVar("_T")
Protection = Literal["crc64", "tls", "sha256"]


def protection_of(endpoint: str | None) -> Protection:
    """Return what protects bytes on their way to the server of this endpoint.

    AWS also checks a CRC-64 of what has arrived. Other servers do not all know it; with
    them an encrypted connection must do. Without one they check the SHA-256 that signs
    the request, which takes 0.5 CPU seconds per GiB.
    """
    if endpoint is not None:
        return "tls" if endpoint.startswith("https://") else "sha256"
    # an http:// endpoint in the environment is refused
    is_elsewhere = any(name.startswith("AWS_ENDPOINT") for name in os.environ)
    return "tls" if is_elsewhere else "crc64"


class S3Store:
    """Objects of a bucket under a prefix.

    `protection` is what protects bytes on their way to the server, by default what
    `protection_of` says. `pause_s` is the first of the growing pauses between attempts,
    `timeout_s` the longest silence.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        login: Login,
        limit: BandwidthLimit | None = None,
        endpoint: str | None = None,
        pause_s: float = 0.5,
        timeout_s: float = 20.0,
        protection: Protection | None = None,
    ) -> None:
        self._bucket, self._prefix = bucket, f"{prefix}/" if prefix else ""
        self.limit, self._pause_s = limit or BandwidthLimit(), pause_s
        protection = protection or protection_of(endpoint)
        client = partial(_client, bucket, login, endpoint, protection)
        slow_s = timeout_s + PIECE_BYTES / SLOWEST_BYTES_PER_S
        self._ask = client(silence_s=timeout_s, most_s=timeout_s)
        self._upload = client(silence_s=slow_s, most_s=slow_s)
        self._download = client(silence_s=timeout_s, most_s=_LONGEST_S)

    def __str__(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def put(self, name: str, path: Path, record: FileRecord) -> None:
        check_source(path, record)
        if record.size_bytes <= PIECE_BYTES:
            data = path.read_bytes()
            if record_of_bytes(data) != record:
                raise CorruptData(f"not uploaded: {path} has changed meanwhile")
            return self._create(name, data, record)
        if self._retry(name, lambda: self._compare(name, record)):
            return
        pieces = self._put_pieces(name, path, record)
        index = index_of(pieces)
        self._create(name, index, record, {INDEX: record_of_bytes(index).crc32c})

    def put_text(self, name: str, text: str) -> None:
        data = text.encode()
        self._create(name, data, record_of_bytes(data))

    def get(self, name: str, path: Path, record: FileRecord) -> None:
        pieces = self._retry(name, lambda: self._get_unless_index(name, path, record))
        if pieces is not None:
            receive(path, record, lambda part: self._get_pieces(name, pieces, part))

    def get_text(self, name: str) -> str | None:
        with suppress(FileNotFoundError):
            data = self._retry(name, lambda: self._get_small(name))
            return text_of(data, f"{self}/{name}")

    def names(self, prefix: str) -> list[str]:
        start = self._prefix + prefix
        folder = start.rpartition("/")[0]  # the client lists whole folders

        def attempt() -> list[str]:
            found = obstore.list(self._ask, folder or None).collect()
            return sorted(one["path"] for one in found)

        keys = self._retry(prefix, attempt)
        return [key.removeprefix(self._prefix) for key in keys if key.startswith(start)]

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            delete = partial(obstore.delete, self._ask, self._prefix + name)
            with suppress(FileNotFoundError):
                self._retry(name, delete)

    def written_s(self, name: str) -> float:
        head = partial(obstore.head, self._ask, self._prefix + name)
        return self._retry(name, head)["last_modified"].timestamp()

    def _retry(self, name: str, attempt: Callable[[], _T]) -> _T:
        url = f"s3://{self._bucket}/{self._prefix}{name}"
        return retry(url, errors_translated(url)(attempt), self._pause_s)

    def _create(
        self,
        name: str,
        data: bytes,
        record: FileRecord,
        more: dict[str, str] | None = None,
    ) -> None:
        """Create an object whose metadata say that it stands for `record`."""
        attributes: Any = {
            "Content-Type": "application/octet-stream",
            **metadata(record),
            **(more or {}),
        }
        key = self._prefix + name

        def attempt() -> None:
            self.limit.spend(len(data))
            try:
                obstore.put(
                    self._upload, key, data, mode="create", attributes=attributes
                )
            except AlreadyExistsError as error:
                if not self._compare(name, record):
                    raise TransientError("it existed but is gone now") from error

        self._retry(name, attempt)

    def _compare(self, name: str, expected: FileRecord) -> bool:
        """Return whether the object exists; Conflict if it is not as expected.

        An upload whose reply was lost finds its own object here.
        """
        key = self._prefix + name
        try:
            found = obstore.get(self._ask, key, options={"head": True})
        except FileNotFoundError:
            return False
        there = record_said(found.attributes) or self._looked_at(
            key, found.meta["size"]
        )
        check_same(f"s3://{self._bucket}/{key}", there, expected)
        return True

    def _looked_at(self, key: str, size_bytes: int) -> FileRecord:
        """Return the record of an object that another program has written."""
        if size_bytes > PIECE_BYTES:
            return FileRecord(size_bytes=size_bytes, crc32c="unknown")
        return record_of_bytes(obstore.get(self._download, key).bytes().to_bytes())

    def _put_pieces(
        self, name: str, path: Path, record: FileRecord
    ) -> list[FileRecord]:
        pieces, whole = [], google_crc32c.Checksum()
        with path.open("rb") as file:
            while data := file.read(PIECE_BYTES):
                piece = record_of_bytes(data)
                whole.update(data)
                self._create(piece_name(name, len(pieces), piece), data, piece)
                pieces.append(piece)
        if base64.b64encode(whole.digest()).decode() != record.crc32c:
            raise CorruptData(f"not uploaded: {path} has changed meanwhile")
        return pieces

    def _get_small(self, name: str) -> bytes:
        found = obstore.get(self._ask, self._prefix + name)
        data, said = found.bytes().to_bytes(), record_said(found.attributes)
        if said is not None and said != record_of_bytes(data):
            raise CorruptData(f"it differs from what was written: crc32c {said.crc32c}")
        return data

    def _get_unless_index(
        self, name: str, path: Path, record: FileRecord
    ) -> list[FileRecord] | None:
        """Download a file; if it is in pieces, only return their records."""
        found = obstore.get(self._download, self._prefix + name)
        index = found.attributes.get(INDEX)
        if index is not None:
            return pieces_of(found.bytes().to_bytes(), index)
        size_bytes = found.meta["size"]
        if size_bytes != record.size_bytes:
            raise CorruptData(f"it has {size_bytes} bytes, not {record.size_bytes}")
        receive(path, record, partial(_write, found))

    def _get_pieces(self, name: str, pieces: list[FileRecord], part: Path) -> None:
        with part.open("wb") as file:
            for number, piece in enumerate(pieces):
                own_name = piece_name(name, number, piece)
                attempt = partial(self._get_piece, own_name, piece)
                file.write(self._retry(own_name, attempt))

    def _get_piece(self, name: str, expected: FileRecord) -> bytes:
        found = obstore.get(self._download, self._prefix + name)
        if found.meta["size"] != expected.size_bytes:
            raise CorruptData(f"it has {found.meta['size']} bytes")
        data = found.bytes().to_bytes()
        if record_of_bytes(data) != expected:
            raise CorruptData(
                f"it differs from what was written: crc32c {expected.crc32c}"
            )
        return data


def _client(
    bucket: str,
    login: Login,
    endpoint: str | None,
    protection: Protection,
    silence_s: float,
    most_s: float,
) -> Client:
    """Return a client that tries once; a request takes at most `most_s`."""
    more: dict[str, Any] = {} if endpoint is None else {"endpoint": endpoint}
    if protection != "sha256":
        more["unsigned_payload"] = True
    if protection == "crc64":
        more["checksum_algorithm"] = "CRC64NVME"
    return Client(
        bucket,
        region=login.region,
        disable_bulk_delete=True,  # not every server can delete in bulk
        client_options={
            "allow_http": endpoint is not None and endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=min(silence_s, _CONNECT_S)),
            "read_timeout": timedelta(seconds=silence_s),
            "timeout": timedelta(seconds=most_s),
        },
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=most_s)},
        credential_provider=login.credentials,
        **more,
    )


def _write(found: Any, path: Path) -> None:
    with path.open("wb") as file:
        for chunk in found:
            file.write(chunk)
