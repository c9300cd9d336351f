# SPDX-License-Identifier: Apache-2.0
"""Checks names of S3 buckets and servers before anything is sent or written.

Owns the spelling of `s3://BUCKET/PREFIX` and of an endpoint. Credentials in either are
refused and not repeated: they would end up in a run's files. Does not own the store
(`s3.py`), whose library this file does not import.
"""

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from hetjax.errors import BadInput

S3 = "s3://"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_OPTION = "--checkpoint.endpoint"


def endpoint_problems(url: str | None, endpoint: str | None) -> Iterator[BadInput]:
    """Yield what is wrong with an endpoint, also if this store can have none."""
    if endpoint is None:
        return
    if not (url or "").startswith(S3):
        yield BadInput(
            got=f"{_OPTION} with the store {url}" if url else f"{_OPTION} alone",
            allowed=f"{_OPTION} with a store {S3}BUCKET/PREFIX",
            fix=f"leave {_OPTION} out, or name the store {S3}BUCKET/PREFIX",
        )
    elif not _is_server(endpoint):
        shown = "a name or password" if "@" in endpoint else repr(endpoint)
        yield BadInput(
            got=f"{_OPTION} with {shown}",
            allowed="https://HOST:PORT or http://HOST:PORT, and nothing else",
            fix=f"write it like {_OPTION} https://minio.example:9000; credentials "
            "belong in the environment or a profile",
        )


def bucket_problems(url: str) -> Iterator[BadInput]:
    """Yield what is wrong with the URL of a store in an S3 bucket."""
    bucket, _, prefix = url.removeprefix(S3).partition("/")
    if not bucket:
        got = f"checkpoint store {url} without a bucket name"
    elif not _BUCKET.fullmatch(bucket):  # not shown: it may hold a password
        got = f"checkpoint store {S3}... with an invalid bucket name"
    elif any(part in ("", ".", "..") for part in prefix.strip("/").split("/")[1:]):
        got = f"checkpoint store {url}, whose prefix has an empty part, . or .."
    else:
        return
    yield BadInput(
        got=got,
        allowed=f"{S3}BUCKET/PREFIX; a bucket's name has 3 to 63 lower-case letters, "
        "digits, dots and hyphens",
        fix=f"write it like {S3}my-bucket/my-run",
    )


def _is_server(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        return False
    alone = not (parts.path.strip("/") or parts.query or parts.fragment)
    is_web = parts.scheme in ("http", "https")
    return (
        is_web and bool(parts.hostname) and has_port and alone and "@" not in endpoint
    )
