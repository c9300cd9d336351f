# SPDX-License-Identifier: Apache-2.0
"""How a run ends that cannot go on, in words for people.

Owns `Failed`, and what it says of full disks and of stores that fail. Does not own bad
input (`hetjax/errors.py`) nor runs that end as they should (`run.py`).
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from hetjax.checkpoint.stores.store import StoreError
from hetjax.training.config import RunConfig, option

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Failed(Exception):
    """The run cannot go on; the text says why, earlier checkpoints are intact."""

    exit_code = 1


@contextmanager
def clear_ends(config: RunConfig) -> Iterator[None]:
    """Turn a disk that is full and a store that fails into Failed."""
    try:
        yield
    except StoreError as error:
        raise Failed(
            f"got: {error}\n"
            f"allowed: a store that answers and has what was stored "
            f"({option('checkpoint.cloud')} {config.checkpoint.cloud})\n"
            "fix: see that it can be reached from here, then run the same command "
            "again: it goes on from the last checkpoint"
        ) from error
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise Failed(_full(error, config)) from error


def _full(error: OSError, config: RunConfig) -> str:
    where = error.filename or f"a file of the run in {config.run_dir}"
    return (
        f"got: {where}: {error.strerror}\n"
        "allowed: room for the run's files; what was written before is as it was\n"
        "fix: make room on that disk, then run the same command again: it goes on from "
        "the last checkpoint"
    )
