# SPDX-License-Identifier: Apache-2.0
"""The controller's side of getting all workers back to one step.

Owns finishing a step that one survivor has committed, asking who holds what, and the
rounds in which every worker gets what it lacks. Out of the data path: slices go from
worker to worker. Does not own which step and which source (`checkpoint/holdings.py`),
nor who starts workers and chooses the plan (`hetjax/training/`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetjax.checkpoint.holdings import (
    Assignment,
    Holding,
    Source,
    assign,
    newest_step,
)
from hetjax.runtime.control import Crew, Message
from hetjax.runtime.fleet import Fleet
from hetjax.runtime.meeting import Norm, from_words


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """All workers have the state after `step`; what moved, by tier."""

    step: int
    num_bytes: Mapping[str, int] = field(default_factory=dict)


def finish_step(crew: Crew, workers: Sequence[str]) -> Norm | None:
    """Let all survivors finish a step of which one has the norm, and return that.

    They have all done their part of it, or that one would not know the norm. None if
    nobody knows any.
    """
    told = crew.ask(dict.fromkeys(workers, {"do": "outcome"}))
    newest = max((m["at"] for m in told.values() if m["at"] is not None), default=None)
    known = [m["norm"] for m in told.values() if m["at"] == newest and m["norm"]]
    if newest is None or not known:
        return None
    late = [worker for worker, m in told.items() if m["at"] == newest - 1]
    crew.ask(dict.fromkeys(late, {"do": "finish", "norm": known[0]}))
    return from_words(known[0])


def holdings(crew: Crew, workers: Sequence[str], directory: Path) -> list[Holding]:
    """What these workers have in memory, kept there from now on, and on disk."""
    told = crew.ask(dict.fromkeys(workers, {"do": "hold", "directory": str(directory)}))
    return [
        Holding(worker=worker, tier=tier, step=step, leaves=frozenset(leaves))
        for worker, message in told.items()
        for tier, step, leaves in message["holdings"]
    ]


def restore(
    fleet: Fleet, held: Sequence[Holding], others: Sequence[str] = ()
) -> Restored | None:
    """Bring all workers of the fleet to the newest step that is left of the run.

    None if no step is whole. Workers must be built and connected, and so must `others`
    that hold something.
    """
    told = fleet.crew.ask(dict.fromkeys(fleet.workers, {"do": "needs"}))
    leaves = {w: dict[str, int](m["leaves"]) for w, m in told.items()}
    size_bytes = {leaf: n for needed in leaves.values() for leaf, n in needed.items()}
    step = newest_step(held, size_bytes.keys())
    while step is not None:
        lacking = {
            worker: set(leaves[worker])
            for worker, message in told.items()
            if message["at"] != step
        }
        num_bytes = _rounds(fleet, others, held, step, lacking, size_bytes)
        if num_bytes is not None:
            fleet.crew.ask({w: {"do": "place", "step": step} for w in fleet.workers})
            return Restored(step=step, num_bytes=num_bytes)
        step = newest_step(held, size_bytes.keys(), limit=step)
    return None


def _rounds(
    fleet: Fleet,
    others: Sequence[str],
    held: Sequence[Holding],
    step: int,
    lacking: Mapping[str, set[str]],
    size_bytes: Mapping[str, int],
) -> dict[str, int] | None:
    """Move until nobody lacks anything; None if something is nowhere to be had."""
    excluded: set[tuple[str, Source]] = set()
    num_bytes: dict[str, int] = {}
    while any(lacking.values()):
        try:
            found = assign(held, step, lacking, size_bytes, excluded)
        except KeyError:
            return None
        told = fleet.in_turn_each(_orders([*fleet.workers, *others], found, step))
        for message in told.values():
            for tier, count in message["bytes"].items():
                num_bytes[tier] = num_bytes.get(tier, 0) + count
        lacking = {w: set(m["missing"]) for w, m in told.items() if m["missing"]}
        excluded |= {
            (leaf, found[w][leaf]) for w, some in lacking.items() for leaf in some
        }
    return num_bytes


def _orders(workers: Sequence[str], found: Assignment, step: int) -> dict[str, Message]:
    """One message for each worker: what it has, gives and takes."""
    numbers = {leaf: n for n, leaf in enumerate(sorted(_leaves(found)))}
    orders: dict[str, Message] = {
        worker: {"do": "collect", "step": step, "own": {}, "give": [], "take": []}
        for worker in workers
    }
    for worker, sources in found.items():
        by_source: dict[Source, list[str]] = {}
        for leaf, source in sources.items():
            by_source.setdefault(source, []).append(leaf)
        for source, leaves in by_source.items():
            if source.worker == worker:
                orders[worker]["own"][source.tier] = leaves
                continue
            orders[source.worker]["give"].append([worker, source.tier, leaves])
            orders[worker]["take"].append([source.worker, leaves])
    for order in orders.values():
        order["numbers"] = numbers
    return orders


def _leaves(found: Assignment) -> set[str]:
    return {leaf for sources in found.values() for leaf in sources}
