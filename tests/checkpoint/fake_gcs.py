# SPDX-License-Identifier: Apache-2.0
"""An in-memory server for google-cloud-storage's requests, with faults to inject.

Buckets (get), objects (media, multipart and resumable upload, metadata, download with
ranges, list with prefix and pages, delete), generation preconditions. Not here:
credentials, quotas, old versions, compose, XML. Faults are those of `faulty_server.py`.
"""

import base64
import json
import re
import threading
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import unquote

import google_crc32c

from hetjax.checkpoint.stores.store import Store
from tests.checkpoint.faulty_server import FaultyServer, Query, Reply

_BUCKET = re.compile(r"/storage/v1/b/([^/]+)")
_OBJECTS = re.compile(r"(?:/resumable)?(?:/upload)?/storage/v1/b/([^/]+)/o")
_OBJECT = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)")
_BOUNDARY = re.compile(r'boundary="?([^";]+)')
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Object:
    data: bytes
    generation: int
    written_s: float = field(default_factory=time.time)

    @property
    def crc32c(self) -> str:
        return base64.b64encode(google_crc32c.Checksum(self.data).digest()).decode()


@dataclass(kw_only=True, slots=True)
class _Session:
    bucket: str
    metadata: dict[str, str]
    query: Query
    data: bytearray = field(default_factory=bytearray)
    done: dict | None = None


class _Refused(Exception):
    def __init__(self, status: int) -> None:
        self.reply = Reply(
            status=status,
            body=json.dumps({"error": {"code": status, "message": "no"}}).encode(),
            headers={"Content-Type": "application/json"},
        )


class FakeGcs(FaultyServer):
    """Buckets of objects, with their generations."""

    scheme, creating = "gs", "POST"

    def __init__(self, *buckets: str) -> None:
        super().__init__()
        self.buckets: dict[str, dict[str, Object]] = {name: {} for name in buckets}
        self.page_size = 1000
        self._sessions: dict[str, _Session] = {}
        self._generation = 0
        self._lock = threading.Lock()

    def answer(
        self, method: str, path: str, query: Query, headers: Query, body: bytes
    ) -> Reply:
        """Execute a request atomically, as the real server does."""
        with self._lock:
            try:
                return self._answer(method, path, query, headers, body)
            except _Refused as refused:
                return refused.reply

    def store(
        self, prefix: str, *, pause_s: float = 0.001, timeout_s: float = 5.0
    ) -> Store:
        from hetjax.checkpoint.stores.gcs import GcsStore  # slow to import

        return GcsStore("bucket", prefix, pause_s=pause_s, timeout_s=timeout_s)

    def path(self, key: str) -> str:
        return f"/storage/v1/b/bucket/o/{key}"

    def refusal(self, status: int) -> Reply:
        return _Refused(status).reply

    def is_download(self, method: str, query: Query) -> bool:
        return "alt" in query

    def _answer(
        self, method: str, path: str, query: Query, headers: Query, body: bytes
    ) -> Reply:
        if method == "PUT" and "upload_id" in query:
            return self._chunk(query["upload_id"], headers, body)
        if match := _OBJECTS.fullmatch(path):
            bucket = self._bucket(match[1])
            if method == "GET":
                return self._list(bucket, query)
            return self._upload(match[1], query, headers, body)
        if match := _OBJECT.fullmatch(path):
            bucket, name = self._bucket(match[1]), unquote(match[2])
            if name not in bucket:
                raise _Refused(404)
            if method == "DELETE":
                del bucket[name]
                return Reply(status=204)
            if query.get("alt") == "media":
                return _media(bucket[name], headers)
            return _json(_metadata(match[1], name, bucket[name]))
        if match := _BUCKET.fullmatch(path):
            self._bucket(match[1])
            return _json({"kind": "storage#bucket", "name": match[1]})
        raise _Refused(501)

    def _bucket(self, name: str) -> dict[str, Object]:
        if name not in self.buckets:
            raise _Refused(404)
        return self.buckets[name]

    def _list(self, bucket: dict[str, Object], query: Query) -> Reply:
        after, prefix = query.get("pageToken", ""), query.get("prefix", "")
        names = sorted(n for n in bucket if n.startswith(prefix) and n > after)
        page = names[: min(self.page_size, int(query.get("maxResults", 1000)))]
        body: dict[str, object] = {"items": [{"name": name} for name in page]}
        if len(page) < len(names):
            body["nextPageToken"] = page[-1]
        return _json(body)

    def _upload(self, bucket: str, query: Query, headers: Query, body: bytes) -> Reply:
        kind = query["uploadType"]
        if kind == "media":
            return self._create(bucket, {"name": query["name"]}, query, body)
        if kind == "multipart":
            metadata, data = _parts(headers["content-type"], body)
            return self._create(bucket, metadata, query, data)
        assert kind == "resumable", kind
        metadata = json.loads(body or b"{}")
        metadata.setdefault("name", query.get("name"))
        self._check(bucket, metadata["name"], query)
        upload_id = uuid.uuid4().hex
        self._sessions[upload_id] = _Session(
            bucket=bucket, metadata=metadata, query=query
        )
        location = f"{self.url}/upload/storage/v1/b/{bucket}/o?upload_id={upload_id}"
        return Reply(headers={"Location": location, "X-GUploader-UploadID": upload_id})

    def _chunk(self, upload_id: str, headers: Query, body: bytes) -> Reply:
        session = self._sessions.get(upload_id)
        if session is None:
            raise _Refused(404)
        if session.done is not None:
            return _json(session.done)
        text = headers.get("content-range", f"bytes 0-{len(body) - 1}/{len(body)}")
        match = _CONTENT_RANGE.fullmatch(text)
        assert match, text
        if match[1] is not None:
            if int(match[1]) > len(session.data):
                raise _Refused(400)
            session.data[int(match[1]) :] = body
        if match[3] != "*" and len(session.data) == int(match[3]):
            reply = self._create(
                session.bucket, session.metadata, session.query, bytes(session.data)
            )
            session.done = json.loads(reply.body)
            return reply
        stored = {"Range": f"bytes=0-{len(session.data) - 1}"} if session.data else {}
        return Reply(status=308, headers=stored)

    def _create(
        self, bucket: str, metadata: dict[str, str], query: Query, data: bytes
    ) -> Reply:
        name = metadata["name"]
        self._check(bucket, name, query)
        self._generation += 1
        made = Object(data=data, generation=self._generation)
        if metadata.get("crc32c", made.crc32c) != made.crc32c:
            raise _Refused(400)
        self.buckets[bucket][name] = made
        return _json(_metadata(bucket, name, made))

    def _check(self, bucket: str, name: str, query: Query) -> None:
        there = self.buckets[bucket].get(name)
        generation = there.generation if there else 0
        if int(query.get("ifGenerationMatch", generation)) != generation:
            raise _Refused(412)


def _media(found: Object, headers: Query) -> Reply:
    data, size = found.data, len(found.data)
    common = {
        "Accept-Ranges": "bytes",
        "x-goog-generation": str(found.generation),
        "x-goog-stored-content-length": str(size),
        "x-goog-hash": f"crc32c={found.crc32c}",
    }
    match = _RANGE.fullmatch(headers.get("range", ""))
    if not match:
        return Reply(body=data, headers=common)
    first = int(match[1])
    last = min(int(match[2] or size - 1), size - 1)
    if first >= size:
        return Reply(status=416, headers=common | {"Content-Range": f"bytes */{size}"})
    within = {"Content-Range": f"bytes {first}-{last}/{size}"}
    return Reply(status=206, body=data[first : last + 1], headers=common | within)


def _metadata(bucket: str, name: str, found: Object) -> dict[str, str]:
    written = datetime.fromtimestamp(found.written_s, UTC)
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "size": str(len(found.data)),
        "crc32c": found.crc32c,
        "generation": str(found.generation),
        "metageneration": "1",
        "etag": str(found.generation),
        "timeCreated": f"{written:%Y-%m-%dT%H:%M:%S.%fZ}",
    }


def _parts(content_type: str, body: bytes) -> tuple[dict[str, str], bytes]:
    """Return metadata and data, which may hold any bytes, of a multipart upload."""
    match = _BOUNDARY.search(content_type)
    assert match, content_type
    between = b"--" + match[1].encode()
    start, end = body.index(between), body.rindex(b"\r\n" + between + b"--")
    first, _, second = body[start + len(between) : end].partition(b"\r\n" + between)
    metadata = json.loads(first.partition(b"\r\n\r\n")[2])
    return metadata, second.partition(b"\r\n\r\n")[2]


def _json(body: object) -> Reply:
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    return Reply(body=json.dumps(body).encode(), headers=headers)
