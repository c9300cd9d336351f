# SPDX-License-Identifier: Apache-2.0
"""Brings all workers to one step: the controller's side of recovery.

Owns finishing a step that one survivor has committed, finding out who holds what, and
the rounds in which every worker gets what it lacks. Out of the data path: slices go
from worker to worker, or from the store to a worker. Does not own the conclusions from
the answers (`recovery_decisions.py`), the choice of sources
(`checkpoint/recovery_plan.py`), nor the start of workers and the choice of the plan
(`hetjax/training/`).
"""

import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from hetjax.checkpoint.format import other_model
from hetjax.checkpoint.recovery_plan import (
    CLOUD,
    Assignment,
    LeafSource,
    PartialSnapshot,
    Save,
    Tier,
    assign,
    leaves_of,
)
from hetjax.checkpoint.run_identity import is_ours
from hetjax.checkpoint.storage import CheckpointStorage
from hetjax.checkpoint.stored_steps import in_store
from hetjax.runtime.control.controller import Controller
from hetjax.runtime.control.recovery_decisions import (
    ASK_STORE,
    Leftovers,
    Restored,
    after_round,
    committed_step,
    is_kept,
    kept_save,
    next_save,
    safe_save,
    still_saved,
)
from hetjax.runtime.execution.commit import StepCommit
from hetjax.runtime.rpc import schema
from hetjax.runtime.rpc.limits import moving_s
from hetjax.runtime.rpc.worker_connections import WorkerConnections

_NUM_NAMED = 3  # slices that an error lists


def remember_saved(
    controller: Controller, restored: Restored, storage: CheckpointStorage
) -> None:
    """Correct the controller's record of saved steps by what a recovery has found."""
    if controller.saved is None:
        return
    has_store = storage.cloud is not None
    controller.saved = still_saved(controller.saved, restored, has_store)
    controller.is_kept = is_kept(controller.saved, restored)
    controller.safe = safe_save(controller.safe, controller.saved, restored)


def finish_step(
    connections: WorkerConnections, workers: Sequence[str]
) -> StepCommit | None:
    """Let all survivors finish a step that one has committed; return the commit.

    All survivors have done their part of that step, or no worker would know its NORM.
    Returns None if no survivor has a commit.
    """
    answers = connections.ask(dict.fromkeys(workers, schema.TellReached()))
    commit, late = committed_step(answers)
    if commit is not None:
        connections.ask(dict.fromkeys(late, schema.FinishStep(commit=commit)))
    return commit


def in_memory(controller: Controller, workers: Sequence[str]) -> list[PartialSnapshot]:
    """Return the state in these workers' memory; they hold it until `restore` ends."""
    answers = controller.connections.ask(dict.fromkeys(workers, schema.HoldState()))
    return [
        PartialSnapshot(
            worker=worker,
            tier="memory",
            save=(held.at, controller.attempts.get(held.at, "")),
            leaves=frozenset(held.leaves),
        )
        for worker, held in answers.items()
        if held.at is not None
    ]


def on_disk(
    connections: WorkerConnections,
    workers: Sequence[str],
    storage: CheckpointStorage,
    places: MutableMapping[str, str],
) -> list[PartialSnapshot]:
    """Return what the disks of these workers hold; the workers must be built.

    `places` receives the folder of each worker that does not see the run's directory,
    and "" for the others. Raises BadInput if a worker holds the state of another model.
    """
    answers = connections.ask(dict.fromkeys(workers, schema.FindSaves(storage=storage)))
    places.update({worker: answer.place for worker, answer in answers.items()})
    return [
        PartialSnapshot(
            worker=worker,
            tier="disk",
            save=found.save,
            leaves=frozenset(found.leaves),
            host=found.host,
            absent=frozenset(found.absent),
            run=found.run,
            is_trusted=found.is_trusted,
            place=answer.place,
        )
        for worker, answer in answers.items()
        for found in answer.saves
    ]


def restore(
    controller: Controller,
    held: Sequence[PartialSnapshot],
    storage: CheckpointStorage,
    others: Sequence[str] = (),
    most: int | None = None,
) -> Restored | None:
    """Bring all workers to the newest save of the run that can be restored.

    Saves of steps after `most` belong to a discarded past. The store is searched if it
    may have a newer save than the workers have together, or intact copies of damaged
    parts. Returns None if no save is whole. Workers must be built and connected, and so
    must `others` that hold something. Raises BadInput if the save is of another model.
    """
    controller.new_attempts.note(holding.save[1] for holding in held)
    held = _until(most, held)
    answers = controller.connections.ask(
        dict.fromkeys(controller.workers, schema.TellNeeds())
    )
    leaves = {worker: needs.leaves for worker, needs in answers.items()}
    controller.state_bytes = {w: sum(needed.values()) for w, needed in leaves.items()}
    size_bytes = {leaf: n for needed in leaves.values() for leaf, n in needed.items()}
    left = Leftovers(
        held=held, needed=frozenset(size_bytes), saved=controller.saved or 0
    )
    while (save := next_save(left)) is not None:
        if save == ASK_STORE:
            left = left.with_store(_until(most, _in_store(controller, storage)))
            continue
        _check_same_model(left.held, save, size_bytes)
        lacking = {
            worker: set(leaves[worker])
            for worker, needs in answers.items()
            if needs.at != save[0]
        }
        restored = _rounds(
            controller, others, left.held, save, lacking, size_bytes, storage
        )
        if restored is not None:
            expected_s = controller.moving_s()
            request = schema.PlaceState(step=save[0], expected_s=expected_s)
            controller.connections.ask(dict.fromkeys(controller.workers, request))
            said, kept = _said(left.held, save), kept_save(left)
            return replace(restored, host=said, kept=kept)
        left = replace(left, failed=save)
    return None


def _said(held: Sequence[PartialSnapshot], save: Save) -> Mapping[str, Any]:
    return next((h.host for h in held if h.save == save and h.host), {})


def _until(most: int | None, held: Sequence[PartialSnapshot]) -> list[PartialSnapshot]:
    return [h for h in held if most is None or h.save[0] <= most]


def _in_store(
    controller: Controller, storage: CheckpointStorage
) -> list[PartialSnapshot]:
    """Return what the store has; nothing, with a warning, if it cannot be read."""
    try:
        found = in_store(storage.store(is_tried=False), storage.key())
    except OSError as error:
        warnings.warn(f"the store is not used: {error}", stacklevel=2)
        return []
    controller.new_attempts.note(holding.save[1] for holding in found)
    return [holding for holding in found if is_ours(storage.run, holding.run)]


def _check_same_model(
    held: Sequence[PartialSnapshot], save: Save, needed: Mapping[str, int]
) -> None:
    unknown = sorted(leaves_of(held, save) - needed.keys())
    if not unknown:
        return
    named = "; ".join(unknown[:_NUM_NAMED])
    raise other_model(
        f"the checkpoint of step {save[0]}",
        f"{len(unknown)} of its slices do not exist in this run, such as {named}",
    )


def _rounds(
    controller: Controller,
    others: Sequence[str],
    held: Sequence[PartialSnapshot],
    save: Save,
    lacking: Mapping[str, set[str]],
    size_bytes: Mapping[str, int],
    storage: CheckpointStorage,
) -> Restored | None:
    """Move slices until no worker lacks any; return None if one has no source left."""
    excluded: set[tuple[str, LeafSource]] = set()
    restored = Restored(step=save[0])
    while any(lacking.values()):
        try:
            found = assign(held, save, lacking, size_bytes, excluded)
        except KeyError:
            return None
        turn, workers = controller.next_turn(), [*controller.workers, *others]
        orders = _orders(workers, found, save, turn, storage)
        expected_s = _expected_s(found, size_bytes)
        answers = controller.connections.ask(
            {w: replace(order, expected_s=expected_s) for w, order in orders.items()}
        )
        restored = after_round(restored, answers.values())
        lacking = {w: set(m.missing) for w, m in answers.items() if m.missing}
        excluded |= {
            (leaf, found[w][leaf]) for w, some in lacking.items() for leaf in some
        }
    return restored


def _orders(
    workers: Sequence[str],
    found: Assignment,
    save: Save,
    turn: int,
    storage: CheckpointStorage,
) -> dict[str, schema.CollectLeaves]:
    """Return one order per worker: the slices that it loads itself, gives and takes."""
    numbers = {leaf: n for n, leaf in enumerate(sorted(_leaves(found)))}
    own: dict[str, dict[Tier, list[str]]] = {worker: {} for worker in workers}
    give: dict[str, list[tuple[str, Tier, list[str]]]] = {w: [] for w in workers}
    take: dict[str, list[tuple[str, list[str]]]] = {w: [] for w in workers}
    for worker, sources in found.items():
        by_source: dict[LeafSource, list[str]] = {}
        for leaf, source in sources.items():
            by_source.setdefault(source, []).append(leaf)
        for source, leaves in by_source.items():
            if source.worker in (worker, CLOUD):
                own[worker][source.tier] = leaves
                continue
            give[source.worker].append((worker, source.tier, leaves))
            take[worker].append((source.worker, leaves))
    return {
        worker: schema.CollectLeaves(
            save=save,
            turn=turn,
            own=own[worker],
            give=give[worker],
            take=take[worker],
            numbers=numbers,
            storage=storage,
        )
        for worker in workers
    }


def _expected_s(found: Assignment, size_bytes: Mapping[str, int]) -> float | None:
    """Return how long moving all slices takes at worst; None if a store has some."""
    moves = [move for sources in found.values() for move in sources.items()]
    if any(source.worker == CLOUD for _, source in moves):
        return None
    return moving_s(sum(size_bytes[leaf] for leaf, _ in moves))


def _leaves(found: Assignment) -> set[str]:
    return {leaf for sources in found.values() for leaf in sources}
