# SPDX-License-Identifier: Apache-2.0
"""Defines the identity of a run: one random value from its first start.

The identity is in `config.json`, in every manifest and COMMIT, in leases and in
messages. It tells which run some state belongs to. Owns its form and the test which
saves belong to a run. Does not own the decision which run a start resumes
(`training/directory/identity.py`).
"""

import re
import secrets
from dataclasses import dataclass

from hetjax.errors import BadInput
from hetjax.files.tables import read_record

RunId = str
UNIDENTIFIED: RunId = ""  # saves from before runs had identities
_BEFORE = "before-"
_ID_BYTES = 8
_ID = re.compile("[0-9a-z-]{0,40}")
MOST_STARTS = 2**31  # per run, so that names of attempts keep their length


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """A run, and the numbering of its starts.

    The start with lease number n on the run's directory is start number n + `after` of
    the run. `after` is greater than 0 if the run began in another directory.
    """

    id: RunId
    after: int = 0

    def owns(self, saved_by: RunId) -> bool:
        """Return whether a save whose manifest has this identity is of this run."""
        is_older = saved_by == UNIDENTIFIED and began_before_identities(self.id)
        return is_older or saved_by == self.id


def new_id() -> RunId:
    """Return the identity of a run that begins now."""
    return secrets.token_hex(_ID_BYTES)


def id_for_older(fresh: RunId) -> RunId:
    """Return the identity of a run older than identities: its saves have none."""
    return f"{_BEFORE}{fresh}"


def began_before_identities(run: RunId) -> bool:
    return run.startswith(_BEFORE)


def is_id(found: object) -> bool:
    """Return whether a run may have this identity.

    >>> [is_id(found) for found in (id_for_older("0a1b"), UNIDENTIFIED, "a b", 7)]
    [True, True, False, False]
    """
    return isinstance(found, str) and _ID.fullmatch(found) is not None


def parse_identity(raw: object, where: str) -> RunIdentity:
    """Parse an identity from a table of a file; BadInput names the place of errors."""
    found = read_record(
        raw, where=where, required={"id": "a string", "after": "an integer"}
    )
    run = RunIdentity(**found)
    if run.id and is_id(run.id) and 0 <= run.after < MOST_STARTS:
        return run
    raise BadInput(
        got=f"{where}: id {run.id[:80]!r}, after {run.after}",
        allowed="an id of up to 40 characters from 0-9, a-z and '-', and "
        "0 <= after < 2**31",
        fix="restore the file as hetjax wrote it, or give another --run-dir",
    )


def named(run: RunId) -> str:
    """Return the run's name for error messages."""
    return f"run {run}" if run else "a run from before runs had identities"


def is_ours(run: RunIdentity | None, saved_by: RunId) -> bool:
    """Return whether a save belongs to `run`; True for any save if `run` is None."""
    return run is None or run.owns(saved_by)
