# SPDX-License-Identifier: Apache-2.0
"""Classifies errors of the S3 client: which are transient, and which are final.

Owns the classification by status, S3's own code and the client's kind of error. The
texts of errors are not passed on: they may show how a request was signed. Does not own
retries (`store.py`) nor the errors that users see when a store is opened
(`s3_opening.py`).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from obstore.exceptions import (
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)

from hetjax.checkpoint.stores.store import AccessDenied, StoreError, TransientError
from hetjax.errors import BadInput

_TRANSIENT_STATUS = (408, 409, 429)
_TRANSIENT_CODES = ("BadDigest", "RequestTimeout", "XAmzContentSHA256Mismatch")
_OTHER_REGION = ("AuthorizationHeaderMalformed", "PermanentRedirect")
_BAD_LOGIN = ("ExpiredToken", "InvalidToken")
_KINDS = {
    "Connect": "no connection",
    "Request": "connection lost before an answer",
    "Interrupted": "connection lost: incomplete answer",
    "Timeout": "no answer in time",
}
_STATUS = re.compile(r"status code: (\d+)")
_S3_ERROR = re.compile(r"<Code>(\w{1,64})</Code>")
_CLIENT_ERROR = re.compile(r"kind: (\w+)")


class WrongRegion(StoreError):
    """The bucket is not in the region that we ask."""


class InsecureEndpoint(StoreError):
    """The environment names an unencrypted server that the user did not type."""


class UntrustedServer(StoreError):
    """No authority that this machine trusts has signed the server's certificate."""


@contextmanager
def errors_translated(url: str) -> Iterator[None]:
    """Replace the client's errors by ours, which say how to react."""
    try:
        yield
    except (BadInput, StoreError, TransientError):
        raise
    except (BaseError, FileNotFoundError, ValueError) as error:
        raise _classify(url, error) from error


def _classify(url: str, error: Exception) -> Exception:
    text = str(error)
    status = int(found[1]) if (found := _STATUS.search(text)) else 0
    code = found[1] if (found := _S3_ERROR.search(text)) else ""
    kind = found[1] if (found := _CLIENT_ERROR.search(text)) else ""
    # the rest of the text may show how a request was signed
    what = f"{status} {code}".strip() if status else f"{type(error).__name__} {kind}"
    once = f"{url}: tried once: {what.strip()}"
    if isinstance(error, FileNotFoundError) or status == 404:
        return FileNotFoundError(f"{url}: no such object or bucket")
    is_refused = isinstance(error, (PermissionDeniedError, UnauthenticatedError))
    if is_refused or status in (401, 403) or code in _BAD_LOGIN:
        return AccessDenied(once)
    if "BareRedirect" in text or code in _OTHER_REGION:
        return WrongRegion(once)
    if "BadScheme" in text:
        return InsecureEndpoint(f"{url}: http:// without --checkpoint.endpoint")
    if "InvalidCertificate" in text:
        return UntrustedServer(f"{url}: the server's certificate is not trusted")
    passing = status in _TRANSIENT_STATUS or code in _TRANSIENT_CODES
    if passing or (status >= 500 and status != 501):
        return TransientError(what)
    if isinstance(error, BaseError) and not status:
        return TransientError(_KINDS.get(kind, f"request failed: {what}"))
    return StoreError(once if status else f"{once}: {text.partition(chr(10))[0]}")
