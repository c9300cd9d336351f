# SPDX-License-Identifier: Apache-2.0
"""A worker process at its controller's service.

Owns the loop from request to reply, and that the process ends with its controller. Does
not own what a step is (`island.py`), nor where settings and data come from: `Work` is
made by a room above.
"""

import json
import os
import queue
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from hetjax.checkpoint.entry import Entry
from hetjax.checkpoint.format import leaf_names
from hetjax.checkpoint.replication import Copies
from hetjax.checkpoint.storage import Keeping
from hetjax.comm.links import SILENCE_S
from hetjax.comm.peers import PeerLost, Peers
from hetjax.comm.pull import PullServer
from hetjax.errors import BadInput
from hetjax.mesh.world import World
from hetjax.plans.members import file_name
from hetjax.runtime.control import Line, Message
from hetjax.runtime.feeding import Batch
from hetjax.runtime.island import Island, Told
from hetjax.runtime.mates import Mates
from hetjax.runtime.meeting import from_words, in_words
from hetjax.runtime.salvage import Order, Salvage, carry_out, from_leaves, leaf_bytes
from hetjax.runtime.saving import Saving
from hetjax.runtime.timeline import Timeline
from hetjax.runtime.warming import Warmer
from hetjax.schedule.action import format_program

_CONNECT_S = 120.0  # until all peers have called: they may be starved


@dataclass(frozen=True, kw_only=True, slots=True)
class Post:
    """Where a worker stands: what it is told by whoever starts it.

    `listen` is the address at which its peers reach it (port 0: any). One that
    `watches` tells of notices that its machine is about to go.
    """

    worker: str
    controller: str
    listen: str
    secret: bytes
    silence_s: float = SILENCE_S
    watches: bool = False

    def text(self) -> str:
        """One line, for a pipe that nobody else reads."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields | {"secret": self.secret.hex()})


def read_post(text: str) -> Post:
    """Inverse of `Post.text`."""
    fields = json.loads(text)
    return Post(**(fields | {"secret": bytes.fromhex(fields["secret"])}))


class Work(Protocol):
    """What a worker works on: its island and its own copy of the data."""

    @property
    def island(self) -> Island: ...

    def batch(self, step: int) -> Batch:
        """The global batch of a training step."""
        ...

    def validation(self, number: int) -> Batch:
        """One of the global batches of an evaluation."""
        ...


Settings = Mapping[str, Any]  # what the controller sent
# Calls what it is given for each notice, within `with`
Watching = Callable[[Callable[[Message], None]], AbstractContextManager[object]]


def serve(
    post: Post,
    make: Callable[[Settings], Work],
    warm: Callable[[Settings], None] = lambda settings: None,
    watching: Watching = lambda tell: nullcontext(),
) -> None:
    """Do as the controller says until it ends the line.

    `make` makes what the worker works on; `warm` compiles its programs, as may be asked
    ahead of it. What `watching` hears is passed on at once, whatever goes on meanwhile.
    """
    server = _Server(post, make, warm)
    with watching(server.tell_notice):
        server.run()


class _Server:
    def __init__(
        self,
        post: Post,
        make: Callable[[Settings], Work],
        warm: Callable[[Settings], None],
    ) -> None:
        self._post, self._make, self._warm_up = post, make, warm
        self._warmer = Warmer()
        self._requests: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._peers: Peers | None = None
        self._work: Work | None = None
        self._timeline: Timeline | None = None
        self._at: int | None = None  # steps that the state has behind it
        self._told: Told | None = None  # of the last one, if it was done here
        self._salvage = Salvage()
        self._saving = Saving(file_name(post.worker), self._open_copies)
        self._server: PullServer | None = None  # once made, for as long as the process
        host = post.listen.rpartition(":")[0]
        self._mates = Mates(post.worker, host, post.silence_s)
        self._means: dict[str, Callable[[int, Message], Message | None]] = {
            "coordinate": self._coordinate,
            "build": self._build,
            "warm": self._warm,
            "listen": self._listen,
            "join": self._join,
            "compile": self._compile,
            "initialise": self._initialise,
            "step": self._step,
            "outcome": self._outcome,
            "finish": self._finish,
            "hold": self._hold,
            "look": self._look,
            "needs": self._needs,
            "collect": self._collect,
            "place": self._place,
            "clock": self._clock,
            "spans": self._spans,
            "evaluate": self._evaluate,
            "logits": self._logits,
            "saver": self._saver,
            "keep copies": self._saving.keep_copies,
            "send copies": self._saving.send_copies,
            "save": self._save,
            "saved": self._saving.wait,
        }
        warnings.showwarning = self._tell_warning
        self._line = Line(
            post.controller,
            post.worker,
            post.secret,
            self._hear,
            self._end,
            post.silence_s,
        )

    def run(self) -> None:
        while True:
            number, request = self._requests.get()
            if request["do"] == "end":
                break
            answer = self._answer(number, request)
            self._line.reply(number, answer)
            self._mates.done(_lost_in(answer, self._post.worker), self._line.close)
        if self._work is not None:
            self._work.island.leave()
        self._saving.close()
        self._mates.leave()
        self._line.reply(number, {})
        self._line.close()

    def tell_notice(self, notice: Message) -> None:
        self._line.tell(0, {"notice": notice})

    def _tell_warning(self, message: Any, *_: object) -> None:
        """Warnings are the controller's to show."""
        self._line.tell(0, {"warning": str(message)})

    def _hear(self, number: int, request: Message) -> None:
        """Called by the line's thread: breaking off cannot wait for the step's end."""
        if request["do"] != "abort":
            self._mates.begin(number, request["do"])
            self._requests.put((number, request))
            return
        if self._peers is not None:
            self._peers.mailbox.lose(*request["lost"])
        self._mates.break_off()

    def _end(self, reason: str) -> None:
        with suppress(OSError):  # a full disk under the log must not keep us here
            print(f"worker {self._post.worker}: controller {reason}", file=sys.stderr)
        os._exit(1)  # nobody is left to work for; threads may be anywhere

    def _answer(self, number: int, request: Message) -> Message:
        try:
            return self._means[request["do"]](number, request) or {}
        except PeerLost as lost:
            return {"lost": [lost.peer, lost.reason]}
        except BadInput as bad:
            return {"refused": {"got": bad.got, "allowed": bad.allowed, "fix": bad.fix}}
        except Exception as error:
            with suppress(OSError):
                traceback.print_exc()
            return {"failed": f"{type(error).__name__}: {error}"}

    def _coordinate(self, number: int, request: Message) -> Message:
        return {"address": self._mates.coordinate()}

    def _build(self, number: int, request: Message) -> None:
        if "world" in request:
            self._mates.enter(World(**request["world"]))
        if self._work is not None:
            self._work.island.leave()
        self._warmer.clear()
        self._work = self._at = None  # what it held may have been kept: `hold`
        self._work = self._make(request["settings"])
        self._timeline = Timeline(self._island.plan)

    def _warm(self, number: int, request: Message) -> None:
        self._warmer.add(lambda: self._warm_up(request["settings"]))

    def _listen(self, number: int, request: Message) -> Message:
        post = self._post
        self._peers = Peers(post.worker, post.listen, post.secret, post.silence_s)
        return {"address": self._peers.address}

    def _join(self, number: int, request: Message) -> None:
        assert self._peers is not None
        self._peers.connect(request["addresses"], _CONNECT_S)
        if request["transport"] == "transfer" and self._server is None:
            host = self._post.listen.rpartition(":")[0]
            self._server = PullServer(host, self._post.secret)
        server = self._server if request["transport"] == "transfer" else None
        self._island.join(self._peers, request["generation"], server)

    def _compile(self, number: int, request: Message) -> None:
        self._island.compile(
            lambda done, all_: self._line.tell(number, {"done": done, "of": all_})
        )

    def _initialise(self, number: int, request: Message) -> None:
        self._salvage.forget()
        self._island.initialise(request["seed"])
        self._at = 0

    def _step(self, number: int, request: Message) -> Message:
        assert self._work is not None
        batch = self._work.batch(request["step"])
        self._told = None
        self._told = self._island.step(
            request["turn"], batch, self._timeline if request["traced"] else None
        )
        self._at = request["step"] + 1
        return _report(self._told) | {"num_tokens": batch[1].size}

    def _outcome(self, number: int, request: Message) -> Message:
        """How far the state is, and the norm that brought it there."""
        norm = None if self._told is None else in_words(self._told.norm)
        return {"at": self._at, "norm": norm}

    def _finish(self, number: int, request: Message) -> Message:
        assert self._at is not None
        self._told = self._island.finish(from_words(request["norm"]))
        self._at += 1
        return {}

    def _hold(self, number: int, request: Message) -> Message:
        if self._at is not None:
            self._salvage.keep(self._at, self._island.held())
        return {"at": self._salvage.memory_step, "leaves": self._salvage.memory}

    def _look(self, number: int, request: Message) -> Message:
        directory = Keeping(**request["keeping"]).at(file_name(self._post.worker))
        return {"saves": list(self._salvage.look(directory, self._needed()))}

    def _needs(self, number: int, request: Message) -> Message:
        leaves = {leaf: leaf_bytes(entry) for leaf, entry in self._needed().items()}
        return {"at": self._at, "leaves": leaves}

    def _collect(self, number: int, request: Message) -> Message:
        assert self._peers is not None
        fields: dict[str, Any] = {name: request[name] for name in Order.__slots__}
        fields["save"] = tuple(fields["save"])
        order = Order(**fields)
        if order.own.get("cloud"):
            self._open_store(Keeping(**request["keeping"]), order.save[0])
        return carry_out(order, self._salvage, self._peers, self._needed())

    def _open_store(self, keeping: Keeping, step: int) -> None:
        store = keeping.store()
        assert store is not None
        directory = keeping.at(file_name(self._post.worker))
        self._salvage.fetch_from(store, step, directory)

    def _place(self, number: int, request: Message) -> None:
        if self._at != request["step"]:
            values = self._salvage.taken
            self._salvage.let_go()
            self._island.restore(lambda entry: from_leaves(values, entry))
            self._at, self._told = request["step"], None
        self._salvage.forget()

    def _needed(self) -> dict[str, Entry]:
        """The entry of each leaf that the island's state is made of, once it is."""
        if self._work is None:
            return {}
        return {
            leaf: entry for entry in self._island.needed() for leaf in leaf_names(entry)
        }

    def _clock(self, number: int, request: Message) -> Message:
        return {"now_s": time.perf_counter()}

    def _spans(self, number: int, request: Message) -> Message:
        assert self._timeline is not None
        members = self._island.members
        spans = [
            span
            for span in self._timeline.spans()
            if members.worker_of(span.node, span.device) == self._post.worker
        ]
        return {
            "actions": format_program(tuple(span.action for span in spans)),
            "spans": [[span.device, span.start_s, span.end_s] for span in spans],
        }

    def _evaluate(self, number: int, request: Message) -> Message:
        assert self._work is not None
        batch = self._work.validation(request["batch"])
        losses = self._island.evaluate(request["turn"], batch)
        return {"losses": _losses(losses), "num_tokens": batch[1].size}

    def _logits(self, number: int, request: Message) -> Message:
        found_V = self._island.next_logits(request["turn"], request["tokens"])
        return {} if found_V is None else {"logits": found_V.tolist()}

    def _saver(self, number: int, request: Message) -> Message:
        return {"saves": self._island.saves} | self._saving.state()

    def _save(self, number: int, request: Message) -> None:
        self._saving.save(request, [*self._island.entries()])

    def _open_copies(self) -> Copies:
        post = self._post
        host = post.listen.rpartition(":")[0]
        return Copies(file_name(post.worker), host, post.secret, post.silence_s)

    @property
    def _island(self) -> Island:
        assert self._work is not None, "build first"
        return self._work.island


def _lost_in(answer: Message, own: str) -> str | None:
    """Whom the answer tells to be lost; one that has failed is of no more use."""
    return own if "failed" in answer else answer.get("lost", [None])[0]


def _report(told: Told) -> Message:
    return {"grad_norm": told.grad_norm, "losses": _losses(told.norm.losses)}


def _losses(sums: Mapping[tuple[int, int], float]) -> list[list[float]]:
    return [[*stage, value] for stage, value in sums.items()]
