# SPDX-License-Identifier: Apache-2.0
"""How a run ends that cannot go on, in words for people.

Owns what is said of full disks, stores that fail and lost workers. Does not own
`Failed` (`hetjax/errors.py`) nor runs that end as they should (`events.py`).
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from hetjax.checkpoint.stores.store import StoreError
from hetjax.errors import Failed
from hetjax.runtime.rpc.worker_connections import WorkerLost
from hetjax.training.config import RunConfig, option
from hetjax.training.rundir import LOGS

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def clear_ends(config: RunConfig) -> Iterator[None]:
    """Turn a full disk, a store that fails and a lost worker into Failed."""
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
    except WorkerLost as lost:
        raise _without(lost, config) from lost
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


def _without(lost: WorkerLost, config: RunConfig) -> Failed:
    """What to say when a worker is gone and could not be brought back."""
    local = config.launcher == "processes"
    logs = f"the logs in {config.run_dir / LOGS}" if local else "Ray's logs"
    return Failed(
        f"got: {lost}\n"
        f"allowed: all workers of the plan; {len(lost.reports)} others were fine\n"
        f"fix: see {logs}, then run the same command again: it goes on from the last "
        "checkpoint"
    )
