# SPDX-License-Identifier: Apache-2.0
"""The fake S3 against moto: the same requests get the same answers.

botocore signs the requests, so both servers see what a client sends. Where moto does
less than S3 (it accepts bytes that the signature does not cover, and any access key),
the fake follows S3, which `test_s3.py` tests.
"""

import http.client
from collections.abc import Iterator
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from moto.server import ThreadedMotoServer

from tests.checkpoint.fake_s3 import KEY, SECRET, FakeS3

ODD = "odd name/50%2F + \u00fc&="
CREATE = {"If-None-Match": "*"}
MARK = {"x-amz-meta-crc32c": "4waSgw==", "x-amz-meta-size": "4"}
Answer = tuple[int, bytes, dict[str, str]]


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    """The URLs of both servers; moto's has a bucket."""
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    with FakeS3("bucket").serving() as fake:
        urls = {"moto": f"http://{host}:{port}", "fake": fake.url}
        assert ask(urls["moto"], "PUT", "")[0] == 200
        yield urls
    moto.stop()


def ask(
    url: str,
    method: str,
    key: str,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
    query: str = "",
    bucket: str = "bucket",
) -> Answer:
    path = f"/{bucket}" + (f"/{quote(key)}" if key else "")
    request = AWSRequest(method, f"{url}{path}{query}", headers or {}, body)
    S3SigV4Auth(Credentials(KEY, SECRET), "s3", "us-east-1").add_auth(request)
    found = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    try:
        found.request(method, path + query, body, dict(request.headers.items()))
        answer = found.getresponse()
        said = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, answer.read(), said
    finally:
        found.close()


def both(urls: dict[str, str], *request: object, **more: object) -> Answer:
    """Return both servers' answer: status, and an object's content and metadata."""
    answers = {
        name: ask(url, *request, **more)  # pyright: ignore[reportArgumentType]
        for name, url in urls.items()
    }
    fake, moto = answers["fake"], answers["moto"]
    assert fake[0] == moto[0], (request, answers)
    if fake[0] >= 400:
        assert code(fake[1]) == code(moto[1]), answers
    for name in ("etag", *MARK):
        assert fake[2].get(name) == moto[2].get(name), (name, answers)
    return moto


def code(body: bytes) -> str | None:
    return ElementTree.fromstring(body).findtext("Code") if body else None


def listing(body: bytes) -> tuple[list[str], str | None]:
    """Return the keys of a page, and whether there are more."""
    root = ElementTree.fromstring(body)
    for element in root.iter():
        element.tag = element.tag.partition("}")[2] or element.tag
    keys = [element.text or "" for element in root.iterfind("Contents/Key")]
    return keys, root.findtext("IsTruncated")


def test_an_object_is_created_once(urls: dict[str, str]):
    assert both(urls, "PUT", "once", b"data", CREATE)[0] == 200
    assert both(urls, "PUT", "once", b"other", CREATE)[0] == 412
    assert both(urls, "GET", "once")[1] == b"data"
    assert both(urls, "PUT", "once", b"other")[0] == 200
    assert both(urls, "GET", "once")[1] == b"other"


@pytest.mark.parametrize("key", ["plain", ODD])
def test_contents_and_metadata_come_back(urls: dict[str, str], key: str):
    assert both(urls, "PUT", key, b"data", MARK)[0] == 200
    status, body, said = both(urls, "GET", key)
    assert (status, body) == (200, b"data")
    assert said["x-amz-meta-crc32c"] == "4waSgw=="
    status, body, said = both(urls, "HEAD", key)
    assert (status, body, said["content-length"]) == (200, b"", "4")


def test_what_is_not_there(urls: dict[str, str]):
    for method in ("GET", "HEAD"):
        assert both(urls, method, "none")[0] == 404
        assert both(urls, method, "none", bucket="no-bucket")[0] == 404
    assert both(urls, "DELETE", "none")[0] == 204
    assert both(urls, "PUT", "x", b"data", CREATE, bucket="no-bucket")[0] == 404
    listed = both(urls, "GET", "", query="?list-type=2", bucket="no-bucket")
    assert code(listed[1]) == "NoSuchBucket"


def test_what_is_deleted_is_gone_and_can_be_created_again(urls: dict[str, str]):
    assert both(urls, "PUT", "brief", b"data")[0] == 200
    assert both(urls, "DELETE", "brief")[0] == 204
    assert both(urls, "HEAD", "brief")[0] == 404
    assert both(urls, "PUT", "brief", b"data", CREATE)[0] == 200


def test_lists(urls: dict[str, str]):
    for key in ("l/a", "l/b/c", "l/b<&>", "la", "k"):
        both(urls, "PUT", key, b"data")
    for query, more in (("", "false"), ("&max-keys=2", "true")):
        found = {
            name: listing(
                ask(url, "GET", "", query=f"?list-type=2&prefix=l%2F{query}")[1]
            )
            for name, url in urls.items()
        }
        assert found["fake"] == found["moto"]
        assert found["fake"][1] == more
