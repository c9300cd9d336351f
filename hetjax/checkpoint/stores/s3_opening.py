# SPDX-License-Identifier: Apache-2.0
"""Opening a bucket of S3: may we, is it there, and does it create objects only once?

Owns the errors that users see where one cannot be used. Does not own the store itself
(`s3.py`) nor the spelling of its URL (`endpoint.py`). Imported only when an s3:// URL
is opened.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from hetjax.checkpoint.stores.endpoint import S3, bucket_problems
from hetjax.checkpoint.stores.s3 import S3Store
from hetjax.checkpoint.stores.s3_errors import InsecureEndpoint, WrongRegion
from hetjax.checkpoint.stores.s3_login import find_login
from hetjax.checkpoint.stores.store import (
    AccessDenied,
    BandwidthLimit,
    Conflict,
    Store,
    TimeLimitedStore,
)
from hetjax.errors import BadInput

_WRITABLE = ".writable"


def open_bucket(
    url: str, limit: BandwidthLimit, endpoint: str | None, is_tried: bool = True
) -> TimeLimitedStore:
    """The store; if it is tried, after listing and writing there: BadInput where that
    cannot be, or where objects could be overwritten."""
    for problem in bucket_problems(url):
        raise problem
    bucket, _, prefix = url.removeprefix(S3).partition("/")
    login = find_login(url)
    store = TimeLimitedStore(S3Store(bucket, prefix.strip("/"), login, limit, endpoint))
    if is_tried:
        with _refusals_explained(url, bucket, login.region):
            store.names(_WRITABLE)
            _check_creates_once(store)
    return store


def _check_creates_once(store: Store) -> None:
    """Raise BadInput where a second object takes the place of the first."""
    for text in ("", "another"):
        try:
            store.put_text(_WRITABLE, text)
        except Conflict:
            return
    raise BadInput(
        got=f"checkpoint store {store} on a server that ignores If-None-Match: it "
        "overwrites objects that are to be created once",
        allowed="a server that honours conditional writes, as AWS S3 does: two runs "
        "would destroy each other's checkpoints without a word",
        fix="take a newer version of that server, or another store",
    )


@contextmanager
def _refusals_explained(url: str, bucket: str, region: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise BadInput(
            got=f"checkpoint store {url}, but there is no bucket {bucket!r}",
            allowed="a bucket that exists",
            fix=f"check its name, or type `aws s3 mb s3://{bucket}`",
        ) from error
    except WrongRegion as error:
        raise BadInput(
            got=f"checkpoint store {url} is not in the region {region}",
            allowed="the region of the bucket",
            fix="set AWS_REGION to it: `aws s3api get-bucket-location --bucket "
            f"{bucket}` says which it is",
        ) from error
    except AccessDenied as error:
        is_skewed = "RequestTimeTooSkewed" in str(error)
        raise BadInput(
            got=f"checkpoint store {url} refuses these credentials ({error})",
            allowed="a clock that is right by some minutes"
            if is_skewed
            else "credentials that may create, read, list and delete objects there",
            fix="set the clock: `timedatectl set-ntp true`"
            if is_skewed
            else "allow s3:ListBucket on the bucket, and s3:GetObject, s3:PutObject "
            "and s3:DeleteObject on its objects, or set another AWS_PROFILE",
        ) from error
    except InsecureEndpoint as error:
        raise BadInput(
            got=f"checkpoint store {url} with an http:// endpoint in the environment",
            allowed="https, or an http:// endpoint that is typed",
            fix="add --checkpoint.endpoint http://HOST:PORT",
        ) from error
