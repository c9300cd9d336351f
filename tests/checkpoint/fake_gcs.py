# SPDX-License-Identifier: Apache-2.0
"""A server in memory that speaks what google-cloud-storage needs, with faults to order.

Buckets (get), objects (media, multipart and resumable upload, metadata, download with
ranges, list with prefix and pages, delete), generation preconditions. Not here:
credentials, quotas, old versions, compose, XML. `fault(method, path, query)` is called
once a request is read, before it takes effect, and returns one of

    None               nothing happens
    503                that status, the request is not executed
    "reset"            the connection is cut, the request is not executed
    "lose reply"       the request takes effect, then the connection is cut
    ("sleep", s)       a delay, then as usual
    ("truncate", n)    downloads: n bytes of the body, then the connection is cut
    ("corrupt", i)     downloads: a flipped bit in byte i, the hashes stay right
"""

import base64
import json
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit

import google_crc32c

Query = dict[str, str]
Fault = None | int | str | tuple[str, float]
_BUCKET = re.compile(r"/storage/v1/b/([^/]+)")
_OBJECTS = re.compile(r"(?:/resumable)?(?:/upload)?/storage/v1/b/([^/]+)/o")
_OBJECT = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)")
_BOUNDARY = re.compile(r'boundary="?([^";]+)')
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request that was answered."""

    method: str
    path: str
    status: int
    bytes_in: int
    bytes_out: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Object:
    data: bytes
    generation: int

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reply:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class _Refused(Exception):
    def __init__(self, status: int) -> None:
        self.reply = _Reply(
            status=status,
            body=json.dumps({"error": {"code": status, "message": "no"}}).encode(),
            headers={"Content-Type": "application/json"},
        )


class FakeGcs:
    """Buckets of objects; `fault` may be set at any time, `log` tells what happened."""

    def __init__(self, *buckets: str) -> None:
        self.buckets: dict[str, dict[str, Object]] = {name: {} for name in buckets}
        self.fault: Callable[[str, str, Query], Fault] = lambda *_: None
        self.log: list[Request] = []
        self.page_size = 1000
        self.url = ""
        self._sessions: dict[str, _Session] = {}
        self._generation = 0
        self._lock = threading.Lock()

    @contextmanager
    def serving(self, host: str = "127.0.0.1") -> Iterator["FakeGcs"]:
        """Serve on a free port of an address of this machine, given in `url`."""
        handler = type("Handler", (_Handler,), {"fake": self})
        server = _Server((host, 0), handler)
        self.url = f"http://{host}:{server.server_address[1]}"
        serve = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        serve.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()

    def answer(
        self, method: str, path: str, query: Query, headers: Query, body: bytes
    ) -> _Reply:
        """Carry a request out: atomic, as the real one is."""
        with self._lock:
            try:
                return self._answer(method, path, query, headers, body)
            except _Refused as refused:
                return refused.reply

    def _answer(
        self, method: str, path: str, query: Query, headers: Query, body: bytes
    ) -> _Reply:
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
                return _Reply(status=204)
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

    def _list(self, bucket: dict[str, Object], query: Query) -> _Reply:
        after, prefix = query.get("pageToken", ""), query.get("prefix", "")
        names = sorted(n for n in bucket if n.startswith(prefix) and n > after)
        page = names[: min(self.page_size, int(query.get("maxResults", 1000)))]
        body: dict[str, object] = {"items": [{"name": name} for name in page]}
        if len(page) < len(names):
            body["nextPageToken"] = page[-1]
        return _json(body)

    def _upload(self, bucket: str, query: Query, headers: Query, body: bytes) -> _Reply:
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
        return _Reply(headers={"Location": location, "X-GUploader-UploadID": upload_id})

    def _chunk(self, upload_id: str, headers: Query, body: bytes) -> _Reply:
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
        return _Reply(status=308, headers=stored)

    def _create(
        self, bucket: str, metadata: dict[str, str], query: Query, data: bytes
    ) -> _Reply:
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


class _Server(ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False

    def handle_error(self, request: object, client_address: object) -> None:
        """Tell of all but clients that hung up."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # pyright: ignore


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    fake: FakeGcs
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:  # the names are http.server's
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        headers = {key.lower(): value for key, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        fault = self.fake.fault(self.command, parts.path, query)
        if isinstance(fault, tuple) and fault[0] == "sleep":
            time.sleep(fault[1])
        if fault == "reset":
            return self._cut()
        if isinstance(fault, int):
            reply = _Refused(fault).reply
        else:
            reply = self.fake.answer(self.command, parts.path, query, headers, body)
        if fault == "lose reply":
            return self._cut()
        sent = _damaged(reply.body, fault if "alt" in query else None)
        self.fake.log.append(
            Request(
                method=self.command,
                path=unquote(parts.path),
                status=reply.status,
                bytes_in=len(body),
                bytes_out=len(sent),
            )
        )
        self._send(reply, sent)

    def _send(self, reply: _Reply, sent: bytes) -> None:
        self.send_response(reply.status)
        for key, value in reply.headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(sent)
        if len(sent) < len(reply.body):
            self._cut()

    def _cut(self) -> None:
        self.close_connection = True
        with suppress(OSError):  # the client was faster
            self.connection.shutdown(socket.SHUT_RDWR)


def _damaged(body: bytes, fault: Fault) -> bytes:
    action, where = fault if isinstance(fault, tuple) else ("", 0)
    if action == "truncate":
        return body[: int(where)]
    if action == "corrupt" and body:
        i = int(where) % len(body)
        return body[:i] + bytes([body[i] ^ 1]) + body[i + 1 :]
    return body


def _media(found: Object, headers: Query) -> _Reply:
    data, size = found.data, len(found.data)
    common = {
        "Accept-Ranges": "bytes",
        "x-goog-generation": str(found.generation),
        "x-goog-stored-content-length": str(size),
        "x-goog-hash": f"crc32c={found.crc32c}",
    }
    match = _RANGE.fullmatch(headers.get("range", ""))
    if not match:
        return _Reply(body=data, headers=common)
    first = int(match[1])
    last = min(int(match[2] or size - 1), size - 1)
    if first >= size:
        return _Reply(status=416, headers=common | {"Content-Range": f"bytes */{size}"})
    within = {"Content-Range": f"bytes {first}-{last}/{size}"}
    return _Reply(status=206, body=data[first : last + 1], headers=common | within)


def _metadata(bucket: str, name: str, found: Object) -> dict[str, str]:
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "size": str(len(found.data)),
        "crc32c": found.crc32c,
        "generation": str(found.generation),
        "metageneration": "1",
        "etag": str(found.generation),
    }


def _parts(content_type: str, body: bytes) -> tuple[dict[str, str], bytes]:
    """The metadata and the data of a multipart upload, which may hold any bytes."""
    match = _BOUNDARY.search(content_type)
    assert match, content_type
    between = b"--" + match[1].encode()
    start, end = body.index(between), body.rindex(b"\r\n" + between + b"--")
    first, _, second = body[start + len(between) : end].partition(b"\r\n" + between)
    metadata = json.loads(first.partition(b"\r\n\r\n")[2])
    return metadata, second.partition(b"\r\n\r\n")[2]


def _json(body: object) -> _Reply:
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    return _Reply(body=json.dumps(body).encode(), headers=headers)
