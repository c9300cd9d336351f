# SPDX-License-Identifier: Apache-2.0
"""One worker in the controller's own process.

Owns the connection to it: a request is the message itself, its handler is called on the
caller's thread, and what that raises reaches the caller. Does not own what a worker
does (`service.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from hetjax.runtime.rpc.schema import Compiling, Json, Noticed, Request, answer_of
from hetjax.runtime.rpc.worker_connections import Answer, Progress, nobody_counts
from hetjax.runtime.worker.service import Work, WorkerService


class InProcessConnections:
    """The only worker, which cannot be lost; `make` makes what it works on."""

    def __init__(self, worker: str, make: Callable[[Json], Work]) -> None:
        self.only, self.workers, self.epoch = worker, [worker], 0
        self.noticed: Callable[[str, Noticed], None] = lambda worker, notice: None
        self._progress: Progress = nobody_counts
        self._service = WorkerService(worker, make, tell=self._tell)

    def ask(
        self, requests: Mapping[str, Request[Answer]], progress: Progress | None = None
    ) -> dict[str, Answer]:
        """The worker's answer; raises what its handler does."""
        self._progress = progress or nobody_counts
        return {worker: self._answer(request) for worker, request in requests.items()}

    def lose(self, worker: str, reason: str) -> None:
        raise RuntimeError(f"{worker!r} is this process: {reason}")

    @contextmanager
    def interrupted_by(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Nothing in here waits for anybody."""
        yield

    def close(self) -> None:
        """Finish what is being written."""
        self._service.close()

    def _answer(self, request: Request[Answer]) -> Answer:
        answer = self._service.answer(replace(request, epoch=self.epoch))
        assert isinstance(answer, answer_of(type(request))), (request, answer)
        return answer

    def _tell(self, compiling: Compiling) -> None:
        self._progress(self.only, compiling)
