# SPDX-License-Identifier: Apache-2.0
"""The identity of a run: one random value from its first start.

It is in `config.json`, in every manifest and COMMIT, in leases and in messages, and
tells whose state is found in a place. Owns its form and which saves belong to it. Does
not own the decision which run a start resumes (`training/directory/identity.py`).
"""

import re
import secrets
from dataclasses import dataclass

from hetjax.errors import BadInput
from hetjax.files.tables import read_record

RunId = str
UNIDENTIFIED: RunId = ""  # of saves from before runs had identities
_BEFORE = "before-"
_ID_BYTES = 8
_ID = re.compile("[0-9a-z-]{0,40}")
MOST_STARTS = 2**31  # of a run, so that names of attempts keep their length


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """A run, and how its starts are numbered.

    Start number n + `after` of the run is the one that has lease number n on its
    directory: `after` is greater than 0 where the run began in another directory.
    """

    id: RunId
    after: int = 0

    def owns(self, saved_by: RunId) -> bool:
        """Whether a save with this identity in its manifest is one of this run."""
        is_older = saved_by == UNIDENTIFIED and began_before_identities(self.id)
        return is_older or saved_by == self.id


def new_id() -> RunId:
    """The identity of a run that begins now."""
    return secrets.token_hex(_ID_BYTES)


def id_for_older(fresh: RunId) -> RunId:
    """The identity of a run that began before runs had any: its saves have none."""
    return f"{_BEFORE}{fresh}"


def began_before_identities(run: RunId) -> bool:
    return run.startswith(_BEFORE)


def is_id(found: object) -> bool:
    """Whether a run may have this identity.

    >>> [is_id(found) for found in (id_for_older("0a1b"), UNIDENTIFIED, "a b", 7)]
    [True, True, False, False]
    """
    return isinstance(found, str) and _ID.fullmatch(found) is not None


def parse_identity(raw: object, where: str) -> RunIdentity:
    """The identity of a table in a file; BadInput names the place of what is wrong."""
    found = read_record(
        raw, where=where, required={"id": "a string", "after": "an integer"}
    )
    run = RunIdentity(**found)
    if run.id and is_id(run.id) and 0 <= run.after < MOST_STARTS:
        return run
    raise BadInput(
        got=f"{where}: id {run.id[:80]!r}, after {run.after}",
        allowed="an id of up to 40 of 0-9, a-z and '-', and 0 <= after < 2**31",
        fix="restore the file as hetjax wrote it, or give another --run-dir",
    )


def named(run: RunId) -> str:
    """The run as errors call it."""
    return f"run {run}" if run else "a run from before runs had identities"


def is_ours(run: RunIdentity | None, saved_by: RunId) -> bool:
    """Whether a reader that looks for `run` uses the save; None: for any run."""
    return run is None or run.owns(saved_by)
