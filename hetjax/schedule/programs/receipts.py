# SPDX-License-Identifier: Apache-2.0
"""Determines when a worker can be sure that its messages have been received.

Owns the workers' knowledge of each other: a worker that receives a message knows that
its sender has done everything before that SEND, and what the sender then knew about
others (a vector clock, by worker). Nothing else is certain before NORM: another worker
may be as late as its messages permit. Does not own the buffers that wait meanwhile, nor
their bytes (`simulation/memory.py`).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

from hetjax.schedule.programs.action import Action, Message, Op, Programs

Receipts = Mapping[int, list[Message]]  # by index into a worker's program
_Place = tuple[int, int]  # number of a worker, index into its program
_News = Iterable[tuple[int, int]]  # number of a worker, number of its finished actions
_Transfer = tuple[int, Op, Message]  # index into the program


def known_receipts(programs: Programs) -> dict[str, Receipts]:
    """Return, by node and by index into its program, the node's messages that are
    received before that action is done, whatever the order in which workers run."""
    transfers = [_transfers(program) for program in programs.values()]
    received: dict[Message, _Place] = {
        message: (number, index)
        for number, own in enumerate(transfers)
        for index, op, message in own
        if op is Op.RECV
    }
    gossip = _has_ring(_pairs(transfers, received))
    workers = [
        _Worker(number, own, [0] * len(programs), gossip)
        for number, own in enumerate(transfers)
    ]
    sent: dict[Message, _News] = {}
    while any([worker.advance(sent, received) for worker in workers]):
        pass
    return {node: worker.known for node, worker in zip(programs, workers, strict=True)}


def _transfers(program: Iterable[Action]) -> list[_Transfer]:
    return [
        (index, action.op, action.message)
        for index, action in enumerate(program)
        if action.op is Op.SEND or action.op is Op.RECV
    ]


def _pairs(
    transfers: list[list[_Transfer]], received: Mapping[Message, _Place]
) -> set[tuple[int, int]]:
    """Return pairs of workers that exchange messages, the lower number first."""
    ends = {
        (number, received[message][0])
        for number, own in enumerate(transfers)
        for _, op, message in own
        if op is Op.SEND and message in received
    }
    return {(min(pair), max(pair)) for pair in ends if pair[0] != pair[1]}


def _has_ring(pairs: Iterable[tuple[int, int]]) -> bool:
    """Return whether a worker can get news of one of its receivers through others."""
    group: dict[int, int] = {}

    def root(worker: int) -> int:
        while worker in group:
            worker = group[worker]
        return worker

    for one, other in pairs:
        one, other = root(one), root(other)
        if one == other:
            return True
        group[one] = other
    return False


@dataclass(slots=True)
class _Worker:
    """The progress of one worker; `clock` counts the actions that it knows to be done.

    `gossip`: whether it passes on what it has learnt from others. `unsure` has, by
    receiver, the messages that may not have been received, each with the index of its
    RECV.
    """

    number: int
    transfers: list[_Transfer]
    clock: list[int]
    gossip: bool
    position: int = 0
    unsure: dict[int, list[tuple[int, Message]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    known: dict[int, list[Message]] = field(default_factory=dict)

    def advance(
        self, sent: dict[Message, _News], received: Mapping[Message, _Place]
    ) -> bool:
        """Advance to the next RECV of an unsent message; return whether it moved."""
        start, end = self.position, len(self.transfers)
        while self.position < end:
            index, op, message = self.transfers[self.position]
            if op is Op.SEND:
                news = ((self.number, index + 1),)
                sent[message] = (*enumerate(self.clock), *news) if self.gossip else news
                if message in received:
                    receiver, at = received[message]
                    heappush(self.unsure[receiver], (at, message))
            elif message in sent:
                self._learn(index, sent.pop(message))
            else:
                break
            self.position += 1
        return self.position > start

    def _learn(self, index: int, news: _News) -> None:
        clock = self.clock
        for worker, done in news:
            if done > clock[worker]:
                clock[worker] = done
        clock[self.number] = index + 1
        for receiver, messages in self.unsure.items():
            done = clock[receiver]
            while messages and messages[0][0] < done:
                # a message to itself still exists during its RECV
                at = index + (receiver == self.number)
                self.known.setdefault(at, []).append(heappop(messages)[1])
