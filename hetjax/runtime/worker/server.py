# SPDX-License-Identifier: Apache-2.0
"""Runs a worker process at its controller's service.

Owns the threads between request and reply, the handling of errors, and what concerns
the whole process: its warnings, where it is when it takes too long, and that it ends
with its controller. Does not own what is done next (`duties.py`), nor the handlers of
requests (`service.py`).
"""

import faulthandler
import os
import queue
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

from hetjax.comm.handshake import HandshakeRefused
from hetjax.comm.peers import PeerLost
from hetjax.errors import BadInput
from hetjax.runtime.rpc import schema
from hetjax.runtime.rpc.message import AnyRequest
from hetjax.runtime.rpc.worker_connections import ControllerConnection
from hetjax.runtime.worker.bootstrap import WorkerBootstrap
from hetjax.runtime.worker.duties import (
    AbortDuty,
    Action,
    Answered,
    Begin,
    ControllerGone,
    Duties,
    Event,
    Reply,
    Requested,
    react,
)
from hetjax.runtime.worker.service import Work, WorkerService

# Calls its argument for each notice, within `with`
Watching = Callable[[Callable[[schema.Noticed], None]], AbstractContextManager[object]]


def serve(
    bootstrap: WorkerBootstrap,
    make: Callable[[schema.Json], Work],
    warm: Callable[[schema.Json], None] = lambda settings: None,
    watching: Watching = lambda tell: nullcontext(),
) -> None:
    """Do as the controller says until it ends the connection.

    `make` makes the worker's `Work`; `warm` compiles its programs ahead, if requested.
    Notices of `watching` are passed on at once, whatever else runs.
    """
    try:
        server = WorkerServer(bootstrap, make, warm)
    except HandshakeRefused as refused:  # there is no one to work for
        sys.exit(f"worker {bootstrap.worker} ends: {refused}")
    with watching(server.tell_notice):
        server.run()


class WorkerServer:
    """Answers requests one after the other; `run` returns after the last."""

    def __init__(
        self,
        bootstrap: WorkerBootstrap,
        make: Callable[[schema.Json], Work],
        warm: Callable[[schema.Json], None],
    ) -> None:
        self._bootstrap = bootstrap
        self._lock, self._duties = threading.Lock(), Duties()
        self._begun = queue.SimpleQueue[Begin]()
        self._now = Begin(0, schema.TellReached())  # the current request
        self._service = WorkerService(
            bootstrap.worker,
            make,
            bootstrap=bootstrap,
            warm=warm,
            tell=self._tell_compiling,
        )
        warnings.showwarning = self._tell_warning
        self._connection = ControllerConnection(
            bootstrap.controller,
            bootstrap.worker,
            bootstrap.secret,
            self._on_request,
            self._end,
            bootstrap.silence_s,
            bootstrap.incarnation,
            bootstrap.tls,
        )

    def run(self) -> None:
        host_group, own = self._service.host_group, self._bootstrap.worker
        is_over = False
        while not is_over:
            self._now = self._begun.get()
            answer = self._answer(self._now.request)
            is_over = isinstance(self._now.request, schema.Leave)
            if is_over:
                host_group.leave()
            self._handle(Answered(answer))
            host_group.done(_lost_in(answer, own), self._connection.close)
        self._connection.close()

    def tell_notice(self, notice: schema.Noticed) -> None:
        self._connection.send(0, notice)

    def _tell_compiling(self, compiling: schema.Compiling) -> None:
        number, request = self._now.number, self._now.request
        self._connection.send(number, replace(compiling, epoch=request.epoch))

    def _tell_warning(self, message: Any, *_: object) -> None:
        """Send a warning to the controller, which shows it."""
        self._connection.send(0, schema.Warned(text=str(message)))

    def _on_request(self, number: int, request: AnyRequest) -> None:
        """Handle a request on another thread: an abort cannot wait for the step."""
        if not isinstance(request, schema.Abort):
            self._service.host_group.begin(number, type(request))
        self._handle(Requested(number, request))

    def _handle(self, event: Event) -> None:
        """React to an event, and do the resulting actions in order."""
        with self._lock:
            self._duties, actions = react(event, self._duties)
            for action in actions:
                self._do(action)

    def _do(self, action: Action) -> None:
        if isinstance(action, Begin):
            self._begun.put(action)
        elif isinstance(action, Reply):
            self._connection.send(action.number, action.message)
        elif isinstance(action, AbortDuty):
            self._abort(action.request)
        elif action.reason:
            self._die(action.reason)

    def _abort(self, request: schema.Abort) -> None:
        if request.is_late:
            with suppress(OSError):
                print(f"told to abort: {request.reason}", file=sys.stderr)
                faulthandler.dump_traceback(sys.stderr)
        if self._service.peers is not None:
            self._service.peers.lose(request.worker, request.reason)
        self._service.host_group.abort()

    def _end(self, reason: str) -> None:
        self._handle(ControllerGone(reason))

    def _die(self, reason: str) -> None:
        with suppress(OSError):  # a full disk under the log must not stop this
            print(
                f"worker {self._bootstrap.worker}: controller {reason}", file=sys.stderr
            )
        os._exit(1)  # no controller is left; threads may be anywhere

    def _answer(self, request: AnyRequest) -> schema.Message:
        try:
            return self._service.answer(request)
        except PeerLost as lost:
            return schema.Lost(worker=lost.peer, reason=lost.reason)
        except BadInput as bad:
            return schema.RequestRefused(got=bad.got, allowed=bad.allowed, fix=bad.fix)
        except Exception as error:
            with suppress(OSError):
                traceback.print_exc()
            return schema.RequestFailed(error=f"{type(error).__name__}: {error}")


def _lost_in(answer: schema.Message, own: str) -> str | None:
    """Return the worker that an answer reports as lost; `own` after a failure."""
    if isinstance(answer, schema.RequestFailed):
        return own
    return answer.worker if isinstance(answer, schema.Lost) else None
