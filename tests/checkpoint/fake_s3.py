# SPDX-License-Identifier: Apache-2.0
"""An in-memory server that speaks what our store needs of S3, with injected faults.

Objects by path (`/BUCKET/KEY`): put (also only if absent), get, head, delete, list with
prefix and pages. It checks bytes against the SHA-256 that the request's signature
covers, or their CRC-64, the date against the clock, and the access key against `key`.
Not here: signatures, ranges, multipart uploads, versions. Faults are those of
`faulty_server.py`. `test_fake_s3.py` checks this server against moto.
"""

import base64
import hashlib
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from urllib.parse import unquote
from xml.sax.saxutils import escape

from hetjax.checkpoint.stores.s3 import Protection, S3Store
from hetjax.checkpoint.stores.s3_login import Login
from hetjax.checkpoint.stores.store import Store
from tests.checkpoint.faulty_server import FaultyServer, Query, Reply

KEY, SECRET = "AKIAFAKEFAKEFAKE", "a-secret-that-nobody-may-see"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
}
_META, _CRC64 = "x-amz-meta-", "x-amz-checksum-crc64nvme"
_MOST_BYTES = 1 << 17  # limit for checking CRC-64: Python is slow
_SKEW = timedelta(minutes=15)


@dataclass(frozen=True, kw_only=True, slots=True)
class Object:
    data: bytes
    generation: int
    metadata: dict[str, str]
    written_s: float

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'


class _Refused(Exception):
    def __init__(self, status: int, code: str = "No", message: str = "no") -> None:
        self.reply = refused(status, code, message)


def refused(status: int, code: str, message: str = "no") -> Reply:
    """Return the answer to a refused request."""
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return _xml(body, status)


class FakeS3(FaultyServer):
    """Buckets of objects; if `is_old`, the server ignores conditions."""

    scheme, creating = "s3", "PUT"

    def __init__(self, *buckets: str) -> None:
        super().__init__()
        self.buckets: dict[str, dict[str, Object]] = {name: {} for name in buckets}
        self.page_size, self.is_old, self.ahead_s = 1000, False, 0.0
        self.key = KEY
        self._generation = 0
        self._lock = threading.Lock()

    def answer(
        self, method: str, path: str, query: Query, headers: Query, body: bytes
    ) -> Reply:
        """Execute a request atomically, as the real server does."""
        bucket, _, key = unquote(path).removeprefix("/").partition("/")
        with self._lock:
            try:
                self._check(headers, body)
                if bucket not in self.buckets:
                    raise _Refused(404, "NoSuchBucket")
                return self._answer(method, bucket, key, query, headers, body)
            except _Refused as refused:
                return refused.reply

    def store(
        self,
        prefix: str,
        *,
        pause_s: float = 0.001,
        timeout_s: float = 5.0,
        protection: Protection = "sha256",
    ) -> Store:
        return S3Store(
            "bucket",
            prefix,
            Login(region="us-east-1", credentials=credentials),
            endpoint=self.url,
            pause_s=pause_s,
            timeout_s=timeout_s,
            protection=protection,
        )

    def path(self, key: str) -> str:
        return f"/bucket/{key}"

    def refusal(self, status: int) -> Reply:
        return _Refused(status).reply

    def is_download(self, method: str, query: Query) -> bool:
        return method == "GET" and "list-type" not in query

    def _check(self, headers: Query, body: bytes) -> None:
        if f"Credential={self.key}/" not in headers.get("authorization", ""):
            raise _Refused(403, "InvalidAccessKeyId", "the key is unknown")
        date = datetime.strptime(headers["x-amz-date"], "%Y%m%dT%H%M%S%z")
        here = datetime.now(UTC) + timedelta(seconds=self.ahead_s)
        if abs(date - here) > _SKEW:
            raise _Refused(403, "RequestTimeTooSkewed")
        signed, crc64 = headers["x-amz-content-sha256"], headers.get(_CRC64)
        if signed not in ("UNSIGNED-PAYLOAD", hashlib.sha256(body).hexdigest()):
            raise _Refused(400, "XAmzContentSHA256Mismatch")
        if crc64 is not None and len(body) < _MOST_BYTES and crc64 != crc64nvme(body):
            raise _Refused(400, "BadDigest")

    def _answer(
        self,
        method: str,
        name: str,
        key: str,
        query: Query,
        headers: Query,
        body: bytes,
    ) -> Reply:
        bucket = self.buckets[name]
        if not key and method == "GET":
            return self._list(bucket, query)
        if method == "PUT" and key and not query:
            return self._put(bucket, key, headers, body)
        if method == "DELETE" and key:
            bucket.pop(key, None)
            return Reply(status=204)
        if method not in ("GET", "HEAD") or not key:
            raise _Refused(501, "NotImplemented")
        if key not in bucket:
            raise _Refused(404, "NoSuchKey")
        return _media(bucket[key])

    def _put(
        self, bucket: dict[str, Object], key: str, headers: Query, body: bytes
    ) -> Reply:
        if not self.is_old:
            _check_conditions(bucket.get(key), headers)
        self._generation += 1
        made = Object(
            data=body,
            generation=self._generation,
            metadata={n: v for n, v in headers.items() if n.startswith(_META)},
            written_s=time.time() + self.ahead_s,
        )
        bucket[key] = made
        return Reply(headers={"ETag": made.etag})

    def _list(self, bucket: dict[str, Object], query: Query) -> Reply:
        after = query.get("continuation-token", "")
        prefix = query.get("prefix", "")
        keys = sorted(k for k in bucket if k.startswith(prefix) and k > after)
        page = keys[: min(self.page_size, int(query.get("max-keys", 1000)))]
        more = len(page) < len(keys)
        token = (
            f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
            if more
            else ""
        )
        return _xml(
            "<ListBucketResult>"
            + f"<IsTruncated>{str(more).lower()}</IsTruncated>"
            + token
            + "".join(_listed(key, bucket[key]) for key in page)
            + "</ListBucketResult>"
        )


def crc64nvme(data: bytes) -> str:
    """The CRC-64 of the NVM Express specification, as S3 writes it.

    >>> base64.b64decode(crc64nvme(b"123456789")).hex()
    'ae8b14860a799888'
    """
    crc = 2**64 - 1
    for byte in data:
        crc = _CRC64_TABLE[(crc ^ byte) & 255] ^ (crc >> 8)
    return base64.b64encode((crc ^ (2**64 - 1)).to_bytes(8, "big")).decode()


def _crc64_of_byte(crc: int) -> int:
    for _ in range(8):
        crc = (crc >> 1) ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return crc


_CRC64_TABLE = [_crc64_of_byte(byte) for byte in range(256)]


def credentials() -> dict[str, str | None]:
    """Return what a chain of credentials gives the client."""
    return {
        "access_key_id": KEY,
        "secret_access_key": SECRET,
        "token": None,
        "expires_at": None,
    }


def _check_conditions(there: Object | None, headers: Query) -> None:
    if headers.get("if-none-match") == "*" and there is not None:
        raise _Refused(412, "PreconditionFailed")


def _media(found: Object) -> Reply:
    return Reply(
        body=found.data,
        headers={
            "ETag": found.etag,
            "Last-Modified": formatdate(found.written_s, usegmt=True),
            "Content-Type": "application/octet-stream",
            **found.metadata,
        },
    )


def _listed(key: str, found: Object) -> str:
    date = datetime.fromtimestamp(found.written_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return (
        f"<Contents><Key>{escape(key)}</Key><Size>{len(found.data)}</Size>"
        f"<LastModified>{date}.000Z</LastModified>"
        f"<ETag>{escape(found.etag)}</ETag></Contents>"
    )


def _xml(body: str, status: int = 200) -> Reply:
    headers = {"Content-Type": "application/xml"}
    return Reply(status=status, body=body.encode(), headers=headers)
