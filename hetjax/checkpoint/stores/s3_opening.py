# SPDX-License-Identifier: Apache-2.0
"""Opens an S3 bucket: checks access, existence, and that objects are created once.

Owns the errors that users see if a bucket cannot be used. Does not own the store itself
(`s3.py`) nor the spelling of its URL (`endpoint.py`). Imported only when an s3:// URL
is opened.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from hetjax.checkpoint.stores.endpoint import S3, bucket_problems
from hetjax.checkpoint.stores.s3 import S3Store
from hetjax.checkpoint.stores.s3_errors import (
    InsecureEndpoint,
    UntrustedServer,
    WrongRegion,
)
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
_MAY_NOT = (
    "credentials that may create, read, list and delete objects there",
    "allow s3:ListBucket on the bucket, and s3:GetObject, s3:PutObject and "
    "s3:DeleteObject on its objects, or set another AWS_PROFILE",
)
_UNKNOWN = (
    "an access key of this server and the secret that belongs to it",
    "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile",
)
_EXPIRED = ("credentials that are valid now", "log in again, as with `aws sso login`")
# What is allowed and what to type, by S3's error code
_REFUSALS = {
    "RequestTimeTooSkewed": (
        "a clock that is right to within a few minutes",
        "set the clock: `timedatectl set-ntp true`",
    ),
    "InvalidAccessKeyId": _UNKNOWN,
    "SignatureDoesNotMatch": _UNKNOWN,
    "ExpiredToken": _EXPIRED,
    "InvalidToken": _EXPIRED,
}


def open_bucket(
    url: str, limit: BandwidthLimit, endpoint: str | None, is_tried: bool = True
) -> TimeLimitedStore:
    """Open the store, and if `is_tried`, list and write there.

    Raises BadInput if that fails, or if objects could be overwritten.
    """
    for problem in bucket_problems(url):
        raise problem
    bucket, _, prefix = url.removeprefix(S3).partition("/")
    login = find_login(url)
    store = TimeLimitedStore(S3Store(bucket, prefix.strip("/"), login, limit, endpoint))
    if is_tried:
        with _refusals_explained(url, bucket, login.region, endpoint):
            store.names(_WRITABLE)
            _check_creates_once(store)
    return store


def _check_creates_once(store: Store) -> None:
    """Raise BadInput if a second object replaces the first."""
    for text in ("", "another"):
        try:
            store.put_text(_WRITABLE, text)
        except Conflict:
            return
    raise BadInput(
        got=f"checkpoint store {store} on a server that ignores If-None-Match: it "
        "overwrites objects that must be created only once",
        allowed="a server that honours conditional writes, as AWS S3 does; "
        "otherwise two runs would silently destroy each other's checkpoints",
        fix="use a newer version of that server, or another store",
    )


@contextmanager
def _refusals_explained(
    url: str, bucket: str, region: str, endpoint: str | None
) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise BadInput(
            got=f"checkpoint store {url}, but bucket {bucket!r} does not exist",
            allowed="an existing bucket",
            fix=f"check its name, or type `aws s3 mb s3://{bucket}"
            + (f" --endpoint-url {endpoint}`" if endpoint else "`"),
        ) from error
    except WrongRegion as error:
        raise BadInput(
            got=f"checkpoint store {url} is not in the region {region}",
            allowed="the region of the bucket",
            fix="set AWS_REGION to it: `aws s3api get-bucket-location --bucket "
            f"{bucket}` shows it",
        ) from error
    except AccessDenied as error:
        code = str(error).rpartition(" ")[2]
        allowed, fix = _REFUSALS.get(code, _MAY_NOT)
        raise BadInput(
            got=f"checkpoint store {url} refuses these credentials ({error})",
            allowed=allowed,
            fix=fix,
        ) from error
    except InsecureEndpoint as error:
        raise BadInput(
            got=f"checkpoint store {url} with an http:// endpoint in the environment",
            allowed="https, or an http:// endpoint given as an option",
            fix="add --checkpoint.endpoint http://HOST:PORT",
        ) from error
    except UntrustedServer as error:
        raise BadInput(
            got=f"checkpoint store {url} on a server whose certificate is not trusted",
            allowed="a certificate for that name or address, signed by an authority "
            "that this machine trusts",
            fix="set SSL_CERT_FILE to a PEM file with that authority's certificate, on "
            "every machine of the run",
        ) from error
