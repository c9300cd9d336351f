# SPDX-License-Identifier: Apache-2.0
"""Signs and verifies JSON with a run's key: a signature proves the writer had the key.

Owns reading a key file and signatures of JSON. Does not own the signed content:
manifests (`format.py`) and COMMIT (`stored_steps.py`).
"""

import hmac
import json
import os
import shlex
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hetjax.errors import BadInput
from hetjax.files.reading import Unreadable, read_bytes

_LEAST_BYTES, _MOST_BYTES = 32, 4096
_SIGNATURE = "signature"
_SIZE = 32


def read_key(path: Path) -> bytes:
    """Return the key in a file; BadInput if there is none, or others may read it."""
    try:
        data = read_bytes(path, what="key file", most_bytes=_MOST_BYTES)
        mode = path.stat().st_mode
    except Unreadable as error:
        raise _refused(error.got) from error
    except OSError as error:
        raise _refused(f"key file {path} cannot be read ({error.strerror})") from error
    if len(data) < _LEAST_BYTES:
        raise _refused(f"key file {path} with {len(data)} bytes")
    if os.name == "posix" and mode & 0o007:
        raise _refused(
            f"key file {path}, which other users of this machine can access",
            f"chmod 600 {shlex.quote(str(path))}, or ",
        )
    return blake2b(data, digest_size=_SIZE, person=b"run's key").digest()


class NotSigned(ValueError):
    """Content that is not signed with the run's key, so that its writer is unknown."""


def signed(body: Mapping[str, Any], key: bytes | None) -> dict[str, Any]:
    """Return the body with its signature, if there is a key."""
    return dict(body) if key is None else {**body, _SIGNATURE: _signature(body, key)}


def verified(found: Mapping[str, Any], key: bytes | None) -> dict[str, Any]:
    """Return the body without its signature; NotSigned if `key` does not fit it."""
    body = dict(found)
    signature = body.pop(_SIGNATURE, None)
    if key is None:
        return body
    if signature is None:
        raise NotSigned("it is not signed, but this run has a key")
    if not hmac.compare_digest(str(signature), _signature(body, key)):
        raise NotSigned("it is not signed with this run's key")
    return body


def _signature(body: Mapping[str, Any], key: bytes) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = blake2b(canonical.encode(), key=key, digest_size=_SIZE, person=b"signed")
    return digest.hexdigest()


def _refused(got: str, otherwise: str = "") -> BadInput:
    return BadInput(
        got=got,
        allowed=f"a file of {_LEAST_BYTES} to {_MOST_BYTES} random bytes on every "
        "machine of the run, which other users cannot access",
        fix=f"{otherwise}make one: (umask 077; head -c 64 /dev/urandom > run.key)",
    )
