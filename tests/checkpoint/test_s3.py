# SPDX-License-Identifier: Apache-2.0
"""What only S3 has: pieces, credentials, endpoints, unsuitable servers."""

import json
import os
import random
import ssl
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from hetjax.checkpoint.storage import open_store
from hetjax.checkpoint.stores import s3 as s3_module
from hetjax.checkpoint.stores import s3_login
from hetjax.checkpoint.stores.s3 import Protection, protection_of
from hetjax.checkpoint.stores.store import Conflict, CorruptData, Store
from hetjax.errors import BadInput
from tests.checkpoint.fake_s3 import SECRET, FakeS3, refused
from tests.checkpoint.faulty_server import Fault
from tests.checkpoint.test_store import file_of, first_times

PIECE = 1000
DATA = random.Random(3).randbytes(4 * PIECE + 10)


@pytest.fixture
def bucket(s3: FakeS3, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store whose pieces are small."""
    monkeypatch.setattr(s3_module, "PIECE_BYTES", PIECE)
    return s3.store("run")


def opened(s3: FakeS3, url: str = "s3://bucket/run") -> Store:
    return open_store(url, endpoint=s3.url)


@pytest.mark.parametrize("fault", [None, 503, "reset", "lose reply"], ids=str)
def test_large_files_go_in_pieces_that_are_tried_one_by_one(
    s3: FakeS3, bucket: Store, tmp_path: Path, fault: Fault
):
    source, expected = file_of(tmp_path / "a", DATA)
    s3.fault = first_times(1, fault, "PUT")
    bucket.put("x", source, expected)
    sent = sum(r.bytes_in for r in s3.log)
    assert sent < 2 * len(DATA) + 2 * PIECE  # each at most twice
    largest = max(len(found.data) for found in s3.buckets["bucket"].values())
    assert largest == PIECE and len(bucket.names("x")) == 5 + 1
    for damage in (("truncate", 5), ("corrupt", 5)):
        s3.fault = first_times(1, damage, "GET")
        bucket.get("x", tmp_path / "b", expected)
        assert (tmp_path / "b").read_bytes() == DATA
        (tmp_path / "b").unlink()


def test_the_index_is_created_last_and_alone_makes_the_file(
    s3: FakeS3, bucket: Store, tmp_path: Path
):
    source, expected = file_of(tmp_path / "a", DATA)
    s3.fault = lambda method, path, _: 403 if path == "/bucket/run/x" else None
    with pytest.raises(OSError):
        bucket.put("x", source, expected)
    s3.fault = lambda method, path, _: (
        403 if path == "/bucket/run/x" and method == "PUT" else None
    )
    with pytest.raises(OSError):
        bucket.put("x", source, expected)
    assert len(bucket.names("x.pieces/")) == 5
    with pytest.raises(FileNotFoundError):
        bucket.get("x", tmp_path / "b", expected)
    s3.fault, sent = lambda *_: None, len(s3.log)
    bucket.put("x", source, expected)  # its pieces exist
    assert sum(r.status == 200 for r in s3.log[sent:] if r.method == "PUT") == 1


def test_large_files_conflict_before_they_are_sent(
    s3: FakeS3, bucket: Store, tmp_path: Path
):
    bucket.put("x", *file_of(tmp_path / "a", DATA))
    bucket.put("x", *file_of(tmp_path / "a", DATA))
    sent = sum(r.bytes_in for r in s3.log)
    with pytest.raises(Conflict, match=f"and {len(DATA)} bytes"):
        bucket.put("x", *file_of(tmp_path / "b", DATA[::-1]))
    assert sum(r.bytes_in for r in s3.log) == sent


@pytest.mark.parametrize("kind", ["other bytes", "missing", "index"])
def test_damaged_pieces_never_make_a_file(
    s3: FakeS3, bucket: Store, tmp_path: Path, kind: str
):
    source, expected = file_of(tmp_path / "a", DATA)
    bucket.put("x", source, expected)
    objects = s3.buckets["bucket"]
    piece = sorted(name for name in objects if ".pieces/" in name)[2]
    if kind == "missing":
        del objects[piece]
    else:
        name = piece if kind == "other bytes" else "run/x"
        found = objects[name]
        data = found.data[:5] + bytes([found.data[5] ^ 1]) + found.data[6:]
        objects[name] = type(found)(
            data=data, generation=99, metadata=found.metadata, written_s=0.0
        )
    with pytest.raises((CorruptData, FileNotFoundError)):
        bucket.get("x", tmp_path / "b", expected)
    assert list(tmp_path.iterdir()) == [source]


def test_objects_that_another_program_copied_there_can_be_used(
    s3: FakeS3, bucket: Store, tmp_path: Path
):
    source, expected = file_of(tmp_path / "a", DATA)
    bucket.put("x", source, expected)
    (one, *_), objects = s3.buckets["bucket"].values(), s3.buckets["bucket"]
    objects["run/y"] = type(one)(data=DATA, generation=9, metadata={}, written_s=0.0)
    objects["run/t"] = type(one)(data=b"text", generation=9, metadata={}, written_s=0.0)
    bucket.get("y", tmp_path / "b", expected)
    assert (tmp_path / "b").read_bytes() == DATA
    assert bucket.get_text("t") == "text"
    bucket.put_text("t", "text")
    with pytest.raises(Conflict):
        bucket.put_text("t", "test")


def test_an_opened_bucket_works(s3: FakeS3):
    for _ in range(2):
        store = opened(s3, "s3://bucket/a/b/")
        store.put_text("x", "text")
    assert s3.buckets["bucket"]["a/b/x"].data == b"text"
    assert str(store) == "s3://bucket/a/b"
    opened(s3, "s3://bucket").put_text("top", "text")
    assert "top" in s3.buckets["bucket"]


def test_a_server_that_ignores_conditions_is_refused(s3: FakeS3):
    s3.is_old = True
    for _ in range(2):
        with pytest.raises(BadInput, match="ignores If-None-Match"):
            opened(s3)
    s3.is_old = False
    opened(s3)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_bucket_that_refuses_is_bad_input(s3: FakeS3, status: int, method: str):
    s3.fault = lambda got, *_: status if got == method else None
    with pytest.raises(BadInput, match="refuses these credentials") as caught:
        opened(s3)
    assert "s3:PutObject" in caught.value.fix


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        ("InvalidAccessKeyId", "check AWS_ACCESS_KEY_ID"),
        ("SignatureDoesNotMatch", "check AWS_ACCESS_KEY_ID"),
        ("ExpiredToken", "log in again"),
        ("AccessDenied", "s3:PutObject"),
    ],
)
def test_a_refusal_says_what_would_help(
    s3: FakeS3, monkeypatch: pytest.MonkeyPatch, code: str, fix: str
):
    monkeypatch.setattr(s3, "refusal", lambda status: refused(status, code))
    s3.fault = lambda *_: 403
    with pytest.raises(BadInput, match=f"403 {code}") as caught:
        opened(s3)
    assert fix in caught.value.fix


def test_a_bucket_that_is_not_there_is_bad_input(s3: FakeS3):
    with pytest.raises(BadInput, match="bucket 'other' does not exist") as caught:
        opened(s3, "s3://other/run")
    assert f"aws s3 mb s3://other --endpoint-url {s3.url}" in caught.value.fix


def test_a_bucket_of_another_region_is_bad_input(s3: FakeS3):
    s3.fault = lambda *_: 301
    with pytest.raises(BadInput, match="not in the region us-east-1") as caught:
        opened(s3)
    assert "AWS_REGION" in caught.value.fix


def test_a_clock_that_is_off_is_bad_input(s3: FakeS3):
    s3.ahead_s = 3600.0
    with pytest.raises(BadInput, match="RequestTimeTooSkewed") as caught:
        opened(s3)
    assert "set the clock" in caught.value.fix


@pytest.mark.parametrize("protection", ["crc64", "sha256"])
def test_bytes_that_change_on_the_way_are_refused_and_sent_again(
    s3: FakeS3, monkeypatch: pytest.MonkeyPatch, protection: Protection
):
    answer, flipped = s3.answer, []

    def flip(method: str, path: str, query: dict, headers: dict, body: bytes):
        if method == "PUT" and not flipped:
            flipped.append(path)
            body = bytes([body[0] ^ 1]) + body[1:]
        return answer(method, path, query, headers, body)

    monkeypatch.setattr(s3, "answer", flip)
    s3.store("run", protection=protection).put_text("x", "text")
    assert flipped and s3.buckets["bucket"]["run/x"].data == b"text"
    assert [r.status for r in s3.log] == [400, 200]


@pytest.mark.parametrize(
    ("endpoint", "environment", "expected"),
    [
        (None, {}, "crc64"),
        ("https://minio.example:9000", {}, "tls"),
        ("http://minio.example:9000", {}, "sha256"),
        (None, {"AWS_ENDPOINT_URL": "https://minio.example:9000"}, "tls"),
        ("http://a.example", {"AWS_ENDPOINT_URL_S3": "https://b.example"}, "sha256"),
    ],
)
def test_what_protects_bytes_on_their_way(
    endpoint: str | None,
    environment: dict[str, str],
    expected: Protection,
    monkeypatch: pytest.MonkeyPatch,
):
    for name in [name for name in os.environ if name.startswith("AWS_ENDPOINT")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert protection_of(endpoint) == expected


@pytest.fixture
def certified(tmp_path: Path) -> ssl.SSLContext:
    """A server's certificate, own.pem, which nobody trusts yet."""
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1"
    make += " -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out own.pem"
    make += " -addext basicConstraints=critical,CA:FALSE"
    subprocess.run(make.split(), cwd=tmp_path, check=True, capture_output=True)
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(tmp_path / "own.pem", tmp_path / "key.pem")
    return own


def test_a_server_whose_certificate_is_not_trusted_is_bad_input(
    s3: FakeS3, certified: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with s3.serving(tls=certified):
        with pytest.raises(BadInput, match="certificate is not trusted") as caught:
            opened(s3)
    assert "set SSL_CERT_FILE" in caught.value.fix


def test_an_encrypted_server_of_ones_own_gets_requests_without_hashes(
    s3: FakeS3,
    certified: ssl.SSLContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """The SHA-256 would cost more than the encryption; not all know a CRC-64."""
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "own.pem"))
    answer, asked = s3.answer, list[dict[str, str]]()

    def note(method: str, path: str, query: dict, headers: dict, body: bytes):
        asked.append(headers)
        return answer(method, path, query, headers, body)

    monkeypatch.setattr(s3, "answer", note)
    with s3.serving(tls=certified):
        opened(s3).put_text("x", "text")
    assert {h["x-amz-content-sha256"] for h in asked} == {"UNSIGNED-PAYLOAD"}
    assert not any("checksum" in name for headers in asked for name in headers)
    assert s3.buckets["bucket"]["run/x"].data == b"text"


@pytest.mark.parametrize(
    ("url", "got"),
    [
        ("s3://", "without a bucket name"),
        ("s3:///run", "without a bucket name"),
        ("s3://Bucket/run", "an invalid bucket name"),
        ("s3://key:secret@bucket/run", "an invalid bucket name"),
        ("s3://bucket/a//b", "empty part"),
        ("s3://bucket/a/../b", "empty part"),
    ],
)
def test_a_url_that_cannot_be_used_is_bad_input(s3: FakeS3, url: str, got: str):
    with pytest.raises(BadInput) as caught:
        opened(s3, url)
    assert got in caught.value.got and "secret" not in str(caught.value)
    assert s3.log == []


@pytest.mark.parametrize(
    "endpoint",
    [
        "bucket",
        "ftp://host",
        "http://key:secret@host",
        "http://host/path",
        "http://",
        "http://h:x",
    ],
)
def test_an_endpoint_that_cannot_be_used_is_bad_input(endpoint: str):
    with pytest.raises(BadInput, match="--checkpoint.endpoint with") as caught:
        open_store("s3://bucket/run", endpoint=endpoint)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["gs://bucket/run", "/folder"])
def test_an_endpoint_of_another_store_is_bad_input(url: str):
    with pytest.raises(BadInput, match="--checkpoint.endpoint with the store"):
        open_store(url, endpoint="http://host")


def test_an_endpoint_without_encryption_has_to_be_typed(
    s3: FakeS3, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    with pytest.raises(BadInput, match="an http:// endpoint in the environment"):
        open_store("s3://bucket/run")
    assert s3.log == []


def test_no_credentials_at_all_is_bad_input(
    s3: FakeS3, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(BadInput, match="no AWS credentials") as caught:
        opened(s3)
    assert "aws configure" in caught.value.fix
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(BadInput, match="no AWS credentials .ProfileNotFound"):
        opened(s3)


def test_a_profile_has_credentials_and_a_region(
    s3: FakeS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    key, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text(
        f"[mine]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    opened(s3).put_text("x", "text")
    assert s3.buckets["bucket"]["run/x"].data == b"text"


def test_credentials_that_end_are_asked_for_again(
    s3: FakeS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A command provides credentials for a few minutes, as company logins do."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setattr(s3_login, "_ASKED_AGAIN_S", 0.0)
    (tmp_path / "config").write_text(
        f"[default]\ncredential_process = cat {tmp_path}/login\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))

    def log_in(key: str) -> None:
        s3.key = key
        end = datetime.now(UTC) + timedelta(minutes=5)
        login = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": SECRET}
        login["Expiration"] = end.isoformat()
        (tmp_path / "login").write_text(json.dumps(login))

    log_in("AKIAFIRST")
    store = opened(s3)
    log_in("AKIASECOND")
    store.put_text("x", "text")
    assert store.get_text("x") == "text"


def test_a_missing_package_says_what_to_type():
    program = (
        "import sys; sys.modules['obstore'] = None\n"
        "from hetjax.checkpoint.storage import open_store\n"
        "open_store('s3://bucket/run')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "pip install 'hetjax[s3]'" in done.stderr, done.stderr


def test_errors_tell_no_secret(s3: FakeS3):
    bucket = s3.store("run")
    for status in (400, 403, 503):
        s3.fault = lambda *_, status=status: status
        with pytest.raises(OSError) as caught:
            bucket.put_text("x", "text")
        shown, error = "", caught.value
        while error is not None:
            shown, error = f"{shown}{error!r}", error.__cause__
        assert SECRET not in shown and SECRET not in json.dumps(repr(bucket))
