# SPDX-License-Identifier: Apache-2.0
"""Makes the bootstraps of a run's workers: what each receives when it starts.

Owns the secret that workers share and their incarnations. Does not own the form of a
bootstrap (`runtime/worker/bootstrap.py`) nor its delivery to a worker (launchers).
"""

import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from hetjax.checkpoint.replication import GATHERER, PeerReplication
from hetjax.comm.files.giver import FileGiver
from hetjax.comm.tls import Tls
from hetjax.runtime.rpc.limits import WATCHDOG_FACTOR
from hetjax.runtime.rpc.worker_connections import SocketConnections
from hetjax.runtime.worker.bootstrap import WorkerBootstrap

_STARTS = 2**32  # at most, of workers by one controller


@dataclass(frozen=True, kw_only=True, slots=True)
class StartTerms:
    """What one start of a run sets for all of its workers, wherever they are started.

    `number` is greater with each start. Timeouts of requests to workers are multiplied
    by `timeout_scale`. A worker that takes `watchdog_factor` times as long as expected
    counts as hung. `tls` encrypts connections, if it is given. `files` are files of
    this machine that workers fetch, by name. `gathers_in` is the folder of this machine
    in which parts of checkpoints are stored if workers send them.
    """

    number: int = 0
    timeout_scale: float = 1.0
    watchdog_factor: float = WATCHDOG_FACTOR
    tls: Tls | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    gathers_in: Path | None = None


FIRST_START = StartTerms()


class Bootstraps:
    """Makes the bootstraps of one start of a run; workers call its `connections`.

    Workers that are not at the controller's `address` watch their own machines; the
    controller watches its machine. Incarnations grow with the number of the start, and
    with each worker.
    """

    def __init__(self, address: str, stack: ExitStack, terms: StartTerms) -> None:
        self._secret, self._own = secrets.token_bytes(32), address
        self._tls, self._incarnations = terms.tls, count(terms.number * _STARTS + 1)
        self.connections = SocketConnections(
            f"{address}:0",
            self._secret,
            timeout_scale=terms.timeout_scale,
            watchdog_factor=terms.watchdog_factor,
            tls=terms.tls,
        )
        stack.callback(self.connections.close)
        self._files = ""  # the address that serves them
        if terms.files:
            giver = FileGiver(f"{address}:0", self._secret, terms.files, tls=terms.tls)
            stack.callback(giver.close)
            self._files = giver.address
        self._gatherer = ""  # the address that stores parts of checkpoints
        if terms.gathers_in is not None:
            gatherer = PeerReplication(GATHERER, address, self._secret, tls=terms.tls)
            stack.callback(gatherer.close)
            gatherer.store_in(terms.gathers_in, keep=1)
            self._gatherer = gatherer.address

    def bootstrap_for(self, worker: str, address: str) -> WorkerBootstrap:
        """Return the bootstrap of a worker that others reach at this address.

        Processes started earlier under its name can no longer connect.
        """
        incarnation = next(self._incarnations)
        self.connections.expect(worker, incarnation)
        return WorkerBootstrap(
            worker=worker,
            controller=self.connections.address,
            listen=f"{address}:0",
            secret=self._secret,
            watches=address != self._own,
            incarnation=incarnation,
            tls=self._tls,
            files=self._files,
            gatherer=self._gatherer,
        )
