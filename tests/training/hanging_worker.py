# SPDX-License-Identifier: Apache-2.0
"""A worker process whose main thread hangs on request while its heartbeats continue.

A file in the folder HETJAX_TEST_HANGS, named like a request or `start`, makes the first
worker that finds it sleep there.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

from hetjax.runtime.rpc.message import AnyRequest
from hetjax.runtime.rpc.schema import Message
from hetjax.runtime.worker import server
from hetjax.training import worker

FOLDER = "HETJAX_TEST_HANGS"
_answer = server.WorkerServer._answer


def hang(where: str) -> None:
    with suppress(FileNotFoundError):
        Path(os.environ[FOLDER], where).unlink()
        time.sleep(600)


def answer(hanging: server.WorkerServer, request: AnyRequest) -> Message:
    hang(type(request).__name__)
    return _answer(hanging, request)


if __name__ == "__main__":
    hang("start")
    with patch.object(server.WorkerServer, "_answer", answer):
        worker.main()
