# SPDX-License-Identifier: Apache-2.0
"""Keeps checkpoints in a bucket of Google Cloud Storage.

Owns `GcsStore`: create-only uploads, checked downloads, and which of the client's many
errors are transient. Does not own the store protocol, retries and checks (`store.py`).
Imported only when a gs:// URL is opened.
"""

import http.client
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import requests
import urllib3
from google.api_core.exceptions import (
    GoogleAPICallError,
    GoogleAPIError,
    NotFound,
    PreconditionFailed,
    RetryError,
)
from google.auth.exceptions import (
    DefaultCredentialsError,
    GoogleAuthError,
    TransportError,
)
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
from google.cloud.storage.retry import DEFAULT_RETRY

from hetjax.checkpoint.file_records import FileRecord, record_of_bytes
from hetjax.checkpoint.stores.store import (
    AccessDenied,
    BandwidthLimit,
    CorruptData,
    StoreError,
    TimeLimitedStore,
    TransientError,
    check_same,
    check_source,
    receive,
    retry,
    text_of,
)
from hetjax.errors import BadInput

_RESUMABLE_BYTES = 8 << 20  # as the client: larger files go in chunks of this size
_TRANSIENT_STATUS = (408, 410, 429)  # 410: the upload session is over, a new one works
_DENIED_STATUS = (401, 403)
_WRITABLE = ".writable"
_NETWORK_ERRORS = (
    ConnectionError,
    requests.RequestException,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    TransportError,
    RetryError,
    ValueError,  # the server kept less of a chunk than it was sent
)
_CLIENT_ERRORS = (
    DataCorruption,
    InvalidResponse,
    GoogleAPIError,
    GoogleAuthError,
    *_NETWORK_ERRORS,
)
_T = TypeVar("_T")


class GcsStore:
    """Objects of a bucket under a prefix, with the application default credentials.

    With STORAGE_EMULATOR_HOST set it talks to that server, anonymously. `pause_s` is
    the first of the growing pauses between attempts, `timeout_s` the longest silence.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        limit: BandwidthLimit | None = None,
        pause_s: float = 0.5,
        timeout_s: float = 20.0,
    ) -> None:
        self._client = storage.Client(project=None)
        self._bucket = self._client.bucket(bucket)
        self._prefix = f"{prefix}/" if prefix else ""
        self.limit = limit or BandwidthLimit()
        self._pause_s, self._timeout_s = pause_s, timeout_s
        by_chunk = DEFAULT_RETRY.with_delay(pause_s, 8 * pause_s)
        self._retry_chunk = by_chunk.with_timeout(timeout_s)

    def __str__(self) -> str:
        return f"gs://{self._bucket.name}/{self._prefix}".rstrip("/")

    def put(self, name: str, path: Path, record: FileRecord) -> None:
        check_source(path, record)
        self._retry(name, lambda: self._create(name, path.open("rb"), record))

    def put_text(self, name: str, text: str) -> None:
        data = text.encode()
        record = record_of_bytes(data)
        self._retry(name, lambda: self._create(name, io.BytesIO(data), record))

    def get(self, name: str, path: Path, record: FileRecord) -> None:
        def download(part: Path) -> None:
            with part.open("wb") as file:
                self._blob(name).download_to_file(
                    file,
                    raw_download=True,
                    checksum="crc32c",
                    **self._transfer_options(record.size_bytes),
                )

        self._retry(name, lambda: receive(path, record, download))

    def get_text(self, name: str) -> str | None:
        def download() -> bytes:
            return self._blob(name).download_as_bytes(
                raw_download=True, checksum="crc32c", **self._transfer_options()
            )

        with suppress(FileNotFoundError):
            return text_of(self._retry(name, download), f"{self}/{name}")

    def names(self, prefix: str) -> list[str]:
        def attempt() -> list[str]:
            blobs = self._client.list_blobs(
                self._bucket,
                prefix=self._prefix + prefix,
                fields="items(name),nextPageToken",
                **self._transfer_options(),
            )
            return [blob.name.removeprefix(self._prefix) for blob in blobs]

        return self._retry(prefix, attempt)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            blob = self._blob(name)
            with suppress(FileNotFoundError):
                self._retry(name, partial(blob.delete, **self._transfer_options()))

    def written_s(self, name: str) -> float:
        blob = self._blob(name)
        self._retry(name, partial(blob.reload, **self._transfer_options()))
        assert blob.time_created is not None, name
        return blob.time_created.timestamp()

    def _retry(self, name: str, attempt: Callable[[], _T]) -> _T:
        url = self._url(name)
        return retry(url, _errors_translated(url)(attempt), self._pause_s)

    def _create(self, name: str, data: IO[bytes], record: FileRecord) -> None:
        blob = self._blob(name)
        blob.chunk_size = _RESUMABLE_BYTES
        blob.crc32c = record.crc32c  # the server refuses other bytes
        with data, suppress(PreconditionFailed):
            return blob.upload_from_file(
                cast(IO[bytes], _Limited(data, self.limit)),
                size=record.size_bytes,
                content_type="application/octet-stream",
                if_generation_match=0,
                checksum="crc32c",
                **self._transfer_options(record.size_bytes),
            )
        self._compare(name, record)

    def _compare(self, name: str, expected: FileRecord) -> None:
        """Raise Conflict unless the object is as expected: a peer's or our own.

        An upload whose reply was lost also ends up here.
        """
        blob = self._blob(name)
        try:
            blob.reload(**self._transfer_options())
        except NotFound as error:
            raise TransientError("it existed but is gone now") from error
        found = FileRecord(size_bytes=blob.size or 0, crc32c=blob.crc32c or "")
        check_same(self._url(name), found, expected)

    def _transfer_options(self, size_bytes: int = 0) -> dict[str, Any]:
        """Return timeout and retry; the client only retries resumable transfers."""
        retry = self._retry_chunk if size_bytes > _RESUMABLE_BYTES else None
        return {"timeout": self._timeout_s, "retry": retry}

    def _blob(self, name: str) -> storage.Blob:
        return self._bucket.blob(self._prefix + name)

    def _url(self, name: str) -> str:
        return f"gs://{self._bucket.name}/{self._prefix}{name}"


class _Limited:
    """A file whose reads wait for bandwidth; has all that `upload_from_file` calls."""

    def __init__(self, file: IO[bytes], limit: BandwidthLimit) -> None:
        self._file, self._limit = file, limit
        self.tell, self.seek = file.tell, file.seek

    def read(self, num_bytes: int = -1) -> bytes:
        data = self._file.read(num_bytes)
        self._limit.spend(len(data))
        return data


def open_bucket(
    bucket: str, prefix: str, limit: BandwidthLimit, is_tried: bool = True
) -> TimeLimitedStore:
    """Open the store, and if `is_tried`, list and write there.

    Raises BadInput if that fails.
    """
    url = f"gs://{bucket}/{prefix}"
    if not bucket:
        raise BadInput(
            got=f"checkpoint store {url} without a bucket name",
            allowed="gs://BUCKET/PREFIX",
            fix="write it like gs://my-bucket/my-run",
        )
    try:
        store = TimeLimitedStore(GcsStore(bucket, prefix, limit))
        if is_tried:
            store.names(_WRITABLE)
            store.put_text(_WRITABLE, "")
    except DefaultCredentialsError as error:
        raise BadInput(
            got=f"checkpoint store {url}, but no Google Cloud credentials",
            allowed="application default credentials, or a service account's",
            fix="type `gcloud auth application-default login`, or set "
            "GOOGLE_APPLICATION_CREDENTIALS to a key file",
        ) from error
    except FileNotFoundError as error:
        raise BadInput(
            got=f"checkpoint store {url}, but bucket {bucket!r} does not exist",
            allowed="an existing bucket",
            fix=f"check its name, or type `gcloud storage buckets create gs://{bucket}`",
        ) from error
    except AccessDenied as error:
        raise BadInput(
            got=f"checkpoint store {url} refuses these credentials ({error})",
            allowed="credentials that may create, read, list and delete objects there",
            fix="grant the role roles/storage.objectAdmin on the bucket, or type "
            "`gcloud auth application-default login` with another account",
        ) from error
    return store


@contextmanager
def _errors_translated(url: str) -> Iterator[None]:
    """Replace the client's errors by ours, which say how to react."""
    try:
        yield
    except BadInput:  # already ours; it is a ValueError too
        raise
    except _CLIENT_ERRORS as error:
        raise _classify(url, error) from error


def _classify(url: str, error: Exception) -> Exception:
    status, text = _status(error), f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(error, DataCorruption):
        return CorruptData(text)
    if isinstance(error, NotFound):
        return FileNotFoundError(f"{url}: no such object or bucket")
    if status in _DENIED_STATUS or _is_bad_login(error):
        return AccessDenied(f"{url}: tried once: {text}")
    passing = isinstance(error, _NETWORK_ERRORS + (GoogleAuthError,))
    if passing or status in _TRANSIENT_STATUS or status >= 500:
        return TransientError(text)
    return StoreError(f"{url}: tried once: {text}")


def _status(error: Exception) -> int:
    if isinstance(error, InvalidResponse):
        return error.response.status_code
    if isinstance(error, GoogleAPICallError):
        return int(error.code or 0)
    return 0


def _is_bad_login(error: Exception) -> bool:
    if isinstance(error, TransportError):  # the login server did not answer
        return False
    return isinstance(error, GoogleAuthError) and not error.retryable
