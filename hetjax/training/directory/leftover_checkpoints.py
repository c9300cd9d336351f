# SPDX-License-Identifier: Apache-2.0
"""Decides what a start may do with the checkpoints that earlier starts have left.

Owns whether they are of this run, whether the start may begin anew, and the messages
about those that it passes over. Does not own finding and restoring them
(`checkpoint/`, `runtime/control/recovery.py`).
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from hetjax.checkpoint.leases.lease import last_number
from hetjax.checkpoint.other_runs import others_in_store, untrusted_on_disk
from hetjax.checkpoint.reader import partial_checkpoints
from hetjax.checkpoint.recovery_plan import PartialSnapshot, unasked
from hetjax.checkpoint.run_identity import RunIdentity, named, new_id
from hetjax.checkpoint.storage import CheckpointStorage, lease_folder
from hetjax.checkpoint.stored_steps import in_store
from hetjax.errors import BadInput
from hetjax.plans.worker_map import EMBEDDED, file_name, node_of
from hetjax.training.directory.identity import (
    Claim,
    OtherRun,
    SavePlace,
    check_may_adopt,
    decide,
    saved_runs,
)
from hetjax.training.directory.journal import read_journal
from hetjax.training.directory.rundir import LEASE, METRICS, Previous
from hetjax.training.settings.config import RunConfig
from hetjax.training.settings.run_settings import (
    check_identity,
    kept_names,
    settings_to_compare,
)


def claim_of(config: RunConfig, previous: Previous | None) -> Claim:
    """Return the claim of a start that has no lease yet."""
    lease = last_number(lease_folder(config.run_dir / LEASE))
    return Claim(
        run_dir=str(config.run_dir),
        own=None if previous is None else previous.run,
        is_new=previous is None,
        lease=lease + 1,
        fresh=new_id(),
        settings=settings_to_compare(config),
        adopt=config.adopt,
        kept=kept_names(config),
        last_step=_last_step(config) if previous and previous.run is None else 0,
    )


def _last_step(config: RunConfig) -> int:
    """Return the last step that the run directory records; 0 if there is none."""
    lines = read_journal(config.run_dir / METRICS)
    return max((line["step"] for line in lines), default=0)


def identify(
    claim: Claim,
    storage: CheckpointStorage,
    found: Sequence[PartialSnapshot],
    report_line: Callable[[str], None],
) -> RunIdentity:
    """Return the run of a start, judged by the saves that were found.

    Raises OtherRun. `report_line` gets a line if the run directory did not name the
    run.
    """
    trusted = [one for one in found if one.is_trusted]
    decision = decide(claim, saved_runs(trusted, partial(_place_of, storage)))
    _refuse_unread(decision.run, storage, found)
    if decision.adopted is not None:
        report_line(f"this is {named(decision.run.id)}: resuming {decision.adopted}")
    return decision.run


def _place_of(storage: CheckpointStorage, snapshot: PartialSnapshot) -> SavePlace:
    if snapshot.tier == "cloud":
        return SavePlace(name=str(storage.cloud))
    name = snapshot.place or str(storage.at(snapshot.worker))
    if snapshot.worker != EMBEDDED:
        name += f" on {node_of(snapshot.worker)}"
    in_run_dir = not (storage.is_local or snapshot.place)
    return SavePlace(name=name, in_run_dir=in_run_dir)


def _refuse_unread(
    own: RunIdentity, storage: CheckpointStorage, found: Sequence[PartialSnapshot]
) -> None:
    """Raise OtherRun if another run has saves that this run's key does not open.

    The two runs would hinder each other.
    """
    there = [
        (f"checkpoint folder {storage.directory} of {one.worker}", one.save[0], one.run)
        for one in found
        if not (one.is_trusted or own.owns(one.run))
    ]
    stored = others_in_store(storage.store(), own)
    there += [(f"checkpoint store {storage.cloud}", *one) for one in stored]
    for where, step, run in there:
        raise OtherRun(
            got=f"{where}, which holds step {step} of {named(run)} that cannot be "
            f"read{' with this key' if storage.key_file else ''}; this is "
            f"{named(own.id)}",
            allowed="one run per folder or store",
            fix="give this run another folder or store (--checkpoint.local, "
            "--checkpoint.cloud); or, to resume that run, give its "
            "--checkpoint.key-file, or none if it has none",
        )


def saved_here(storage: CheckpointStorage, worker: str) -> list[PartialSnapshot]:
    """Return the saves on this worker's disk, which is local, and in the store.

    Unreadable saves cause no warning here, but where they would be used.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        held = partial_checkpoints(storage.at(worker), storage.key())
    others = untrusted_on_disk(storage.at(worker), storage.key())
    on_disk = [
        PartialSnapshot(
            worker=worker,
            tier="disk",
            save=(one.step, one.attempt),
            leaves=frozenset(),
            host=one.host,
            run=one.run,
            is_trusted=is_trusted,
        )
        for is_trusted, some in ((True, held), (False, others))
        for one in some
    ]
    return on_disk + _saved_in_store(storage)


def _saved_in_store(storage: CheckpointStorage) -> list[PartialSnapshot]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return in_store(storage.store(), storage.key())


def check_store(claim: Claim, storage: CheckpointStorage) -> None:
    """Raise OtherRun if a new directory's store has a run that cannot be its own.

    Machines, which may take long to start, are not needed for that. A later save on
    their disks may still show more.
    """
    if claim.is_new and claim.adopt is None:
        saves = _saved_in_store(storage)
        check_may_adopt(claim, saved_runs(saves, partial(_place_of, storage)))


def check_is_of_run(
    storage: CheckpointStorage,
    own: Mapping[str, Any],
    found: Sequence[PartialSnapshot],
) -> None:
    """Raise BadInput if a save differs in a setting or hash that a run keeps."""
    for snapshot in found:
        where = _place_of(storage, snapshot).name
        check_identity(snapshot.host, own, snapshot.save[0], where)


def check_begins(
    storage: CheckpointStorage,
    saved: int | None,
    was_on: Collection[str],
    held: Sequence[PartialSnapshot],
    asked: Sequence[str],
    step: int | None,
) -> None:
    """Raise BadInput if the run begins anew, but has saved or may have saved before.

    `saved` is the newest step that the run's directory records; `was_on` are the nodes
    on whose own disks the run may have saved without a record. A start that resumes
    from `step` passes over later saves that need parts of workers not `asked`; it only
    warns of each.
    """
    missed = unasked(held, {*map(file_name, asked)})
    if step is not None:
        for later in [later for later in missed if later > step]:
            warnings.warn(passed_over(step, later, missed[later]), stacklevel=2)
        return
    for later, workers in missed.items():
        raise may_be_whole(later, workers)
    if not_asked := {*was_on} - {*map(node_of, asked)}:
        raise may_have_saved(not_asked)
    if saved is None:
        return
    steps = sorted({snapshot.save[0] for snapshot in held})
    there = f"parts of step {', '.join(map(str, steps))}" if steps else "nothing"
    raise BadInput(
        got=f"no complete checkpoint of a run that has saved step {saved}: its workers "
        f"have {there} in {storage.directory}, and the store is "
        f"{storage.cloud or 'none'}",
        allowed="all slices of a step on the disks of the workers or in the store",
        fix="restore that folder (is its disk mounted?), start with the nodes that "
        "have the rest, give --checkpoint.cloud, or start anew with another --run-dir",
    )


def may_have_saved(nodes: Iterable[str]) -> BadInput:
    """Return the error for a run that was on these nodes last, and may have saved."""
    names = ", ".join(sorted(nodes))
    return BadInput(
        got="no checkpoint on the nodes of the plan, but the run was last on "
        f"{names}, where the plan has no stage",
        allowed="a plan with stages on all nodes that the run was on",
        fix="give a plan that also has stages on these (--plan), or start anew with "
        "another --run-dir",
    )


def passed_over(step: int, later: int, workers: Iterable[str]) -> str:
    """Return the warning about a `later` step that is passed over but may be whole."""
    return (
        f"resuming from step {step}: the checkpoint of step {later} may be complete "
        f"with the parts of {', '.join(sorted(workers))}, where the plan has no stage; "
        f"to resume from step {later}, stop now and start with a plan that also has "
        "stages on these (--plan)"
    )


def may_be_whole(step: int, workers: Iterable[str]) -> BadInput:
    """Return the error for a save that may be whole with parts of unasked workers."""
    return BadInput(
        got=f"a checkpoint of step {step} that may need the parts on "
        f"{', '.join(sorted(workers))}, where the plan has no stage",
        allowed="a plan with stages on all nodes that saved it",
        fix="give a plan that also has stages on these (--plan, such as the one that "
        "the run had), or start anew with another --run-dir",
    )
