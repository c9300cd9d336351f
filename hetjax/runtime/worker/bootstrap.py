# SPDX-License-Identifier: Apache-2.0
"""What a worker process is given by whoever starts it, before it can call anybody.

Owns these words and their form on a pipe. Does not own who says them
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
    """Where a worker stands: what it is given by whoever starts it.

    `listen` is the address at which its peers reach it (port 0: any). One that
    `watches` tells of notices that its machine is about to go. `incarnation` is greater
    with each start of a worker: an older one is let in nowhere any more. Whoever starts
    it may say the `only_code` that it calls because a controller names it, empty: none.
    At `files` it gets files of the controller's machine; empty: there is nobody.
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

    @property
    def giver(self) -> GiverPlace | None:
        """Who gives it files, if somebody does."""
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
        """One line, for a pipe that nobody else reads."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        tls = None if self.tls is None else asdict(self.tls)
        return json.dumps(fields | {"secret": self.secret.hex(), "tls": tls})


def read_bootstrap(text: str) -> WorkerBootstrap:
    """Inverse of `WorkerBootstrap.text`."""
    fields = json_value(text)
    tls = fields["tls"] and Tls(**fields["tls"])
    secret = bytes.fromhex(fields["secret"])
    return WorkerBootstrap(**(fields | {"secret": secret, "tls": tls}))
