# SPDX-License-Identifier: Apache-2.0
"""Defines what a worker process gets from its launcher before it can call others.

Owns these fields and their form on a pipe. Does not own who sends them
(`launchers/bootstraps.py`).
"""

import json
from dataclasses import asdict, dataclass

from hetjax.comm.connections import SILENCE_S
from hetjax.comm.files.taker import GiverPlace
from hetjax.comm.tls import Tls
from hetjax.files.parsing import json_value


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerBootstrap:
    """The settings that a worker gets from its launcher.

    `listen` is the address at which its peers reach it (port 0: any). A worker that
    `watches` reports notices that its machine is about to be taken away. `incarnation`
    is greater with each start of a worker: an older one is admitted nowhere any more.
    `only_code`, if set, is the only code that the worker calls because a controller
    names it; empty: none. `files` is the address of a giver of the controller's files,
    `gatherer` the address that stores parts of checkpoints on the controller's machine;
    empty: there is none.
    """

    worker: str
    controller: str
    listen: str
    secret: bytes
    silence_s: float = SILENCE_S
    watches: bool = False
    incarnation: int = 0
    tls: Tls | None = None
    only_code: str | None = None
    files: str = ""
    gatherer: str = ""

    @property
    def giver(self) -> GiverPlace | None:
        """The giver of its files, if there is one."""
        if not self.files:
            return None
        return GiverPlace(
            address=self.files,
            own=self.worker,
            secret=self.secret,
            silence_s=self.silence_s,
            incarnation=self.incarnation,
            tls=self.tls,
        )

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0]

    def text(self) -> str:
        """Return the settings as one line, for a pipe that no one else reads."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        tls = None if self.tls is None else asdict(self.tls)
        return json.dumps(fields | {"secret": self.secret.hex(), "tls": tls})


def read_bootstrap(text: str) -> WorkerBootstrap:
    """Inverse of `WorkerBootstrap.text`."""
    fields = json_value(text)
    tls = fields["tls"] and Tls(**fields["tls"])
    secret = bytes.fromhex(fields["secret"])
    return WorkerBootstrap(**(fields | {"secret": secret, "tls": tls}))
