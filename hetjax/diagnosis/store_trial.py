# SPDX-License-Identifier: Apache-2.0
"""Tries every operation of a run on a checkpoint store, with one small object.

Owns the order of the operations, and what to type if one fails. Does not own the store
(`checkpoint/stores/`), which the caller has opened.
"""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from hetjax.checkpoint.stores.store import AccessDenied, Conflict, Store
from hetjax.errors import BadInput

_PERMISSIONS = {
    "s3": "allow s3:{} on the bucket and its objects",
    "gs": "grant the role roles/storage.objectAdmin on the bucket",
}
_S3_ACTIONS = {
    "writing": "PutObject",
    "listing": "ListBucket",
    "reading": "GetObject",
    "deleting": "DeleteObject",
}


def trial(store: Store, url: str) -> float:
    """Write, list, read, overwrite and delete; return how far the store's clock is
    ahead in seconds. Raises BadInput if one of these does not work as a run needs."""
    name = f".hetjax-doctor-{uuid.uuid4().hex}"
    with _asked(url, "writing"):
        before_s = time.time()
        store.put_text(name, "one")
        here_s = (before_s + time.time()) / 2
    try:
        with _asked(url, "listing"):
            _check(
                name in store.names(name), url, "does not list an object just written"
            )
        with _asked(url, "reading"):
            same = store.get_text(name) == "one"
            _check(same, url, "does not return what was written")
            ahead_s = store.written_s(name) - here_s
        with _asked(url, "writing"):
            _check(
                _is_created_once(store, name),
                url,
                "overwrites objects that must be created only once: two runs would "
                "destroy each other's checkpoints",
            )
    finally:
        with _asked(url, "deleting"):
            store.remove([name])
    with _asked(url, "reading"):
        _check(store.get_text(name) is None, url, "still returns a deleted object")
    return ahead_s


def _is_created_once(store: Store, name: str) -> bool:
    try:
        store.put_text(name, "two")
    except Conflict:
        return True
    return False


def _check(is_so: bool, url: str, does: str) -> None:
    if not is_so:
        raise BadInput(
            got=f"checkpoint store {url} {does}",
            allowed="a store that creates an object only once and shows it at once",
            fix="use a newer version of its server, or another store",
        )


@contextmanager
def _asked(url: str, what: str) -> Iterator[None]:
    try:
        yield
    except AccessDenied as error:
        permission = _PERMISSIONS.get(url.partition("://")[0], "get permission")
        raise BadInput(
            got=f"checkpoint store {url} refuses {what} ({error})",
            allowed="credentials that may create, read, list and delete objects there",
            fix=permission.format(_S3_ACTIONS[what]),
        ) from error
