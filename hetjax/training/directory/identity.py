# SPDX-License-Identifier: Apache-2.0
"""Decides which run a start resumes: its own, one to adopt, or a new one.

Owns the decision, a pure function of the run directory's contents and of the saves that
were found in its folders and its store, and the errors if it is not possible. Does not
own the identity itself (`checkpoint/run_identity.py`) nor finding saves.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetjax.checkpoint.format import start_of
from hetjax.checkpoint.recovery_plan import PartialSnapshot
from hetjax.checkpoint.run_identity import (
    UNIDENTIFIED,
    RunId,
    RunIdentity,
    began_before_identities,
    id_for_older,
    is_id,
    named,
)
from hetjax.errors import BadInput, listed
from hetjax.files.tables import as_kind
from hetjax.training.settings.checks import as_options

OLDER = "before"  # what --adopt calls a run without identity
BASE = "frozen weights"  # the name of their digest among a run's hashes
_ALLOWED = (
    "one run per folder or store: the run directory's or, if that is empty, a run with "
    "the same settings"
)
_OTHER_FOLDERS = (
    "give this run another folder or store (--checkpoint.local, --checkpoint.cloud), "
    "or remove the step_* folders of the other run there"
)


class OtherRun(BadInput):
    """Saves do not, or may not, belong to the run of a start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What a start knows of its run before it has seen any saves.

    `own` is the identity in the run directory. Without one the directory is new
    (`is_new`) or from before runs had identities. `lease` is the number of the start's
    lease on the directory, and `fresh` an unused identity. A run that is resumed must
    have the same `settings` and `hashes` (of text, tokenizer and frozen weights).
    `adopt` is the run that the user asks for. An adopted run must still have the same
    hashes and the same settings named in `kept`. `last_step` is the last step that a
    directory from before identities records.
    """

    run_dir: str
    own: RunIdentity | None
    is_new: bool
    lease: int
    fresh: RunId
    settings: Mapping[str, Any]
    hashes: Mapping[str, str] = field(default_factory=dict)
    adopt: RunId | None = None
    kept: Collection[str] = ()
    last_step: int = 0

    def unlike(self, saved: "SavedRun") -> list[str]:
        """Return the names of settings and files that differ from a saved run's.

        A name that only one of the two has does not count: it has its default there.
        """
        own = {**self.settings, **self.hashes}
        there = saved.settings
        return [name for name in own if name in there and own[name] != there[name]]

    def may_adopt(self, saved: "SavedRun") -> bool:
        """Return whether all settings and hashes that an adopted run keeps match."""
        kept = {*self.kept, *self.hashes}
        return kept.isdisjoint(self.unlike(saved))


@dataclass(frozen=True, kw_only=True, slots=True)
class SavePlace:
    """The place of a save: its name in errors, and whether it is the run directory."""

    name: str
    in_run_dir: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRun:
    """A run that has saves: its newest start and step, and its settings.

    `start_in_run_dir` is the newest start that has saved in the run directory itself,
    and `step_elsewhere` the newest step in other places; 0 if there is none.
    """

    id: RunId
    places: tuple[str, ...]
    start: int
    step: int
    start_in_run_dir: int = 0
    step_elsewhere: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{named(self.id)} (step {self.step} in {listed(self.places)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The run of a start.

    `adopted` is the saved run that it resumes, if the run directory did not name it.
    """

    run: RunIdentity
    adopted: SavedRun | None = None


def settled(claim: Claim, run: RunIdentity) -> Claim:
    """Return the claim with the identity that was found for the start."""
    return replace(claim, own=run, adopt=claim.adopt and run.id)


def provisional(claim: Claim) -> RunIdentity:
    """Return the identity to use until saves have been looked for."""
    return claim.own or _first_identity(claim)


def saved_runs(
    snapshots: Iterable[PartialSnapshot],
    place_of: Callable[[PartialSnapshot], SavePlace],
) -> list[SavedRun]:
    """Return the runs of these saves, sorted by oldest save.

    Raises BadInput if the settings in a save are not a table.
    """
    by_run: dict[RunId, list[PartialSnapshot]] = {}
    for one in sorted(snapshots, key=lambda one: one.save):
        by_run.setdefault(one.run, []).append(one)
    return [_saved_run(run, saves, place_of) for run, saves in by_run.items()]


def _saved_run(
    run: RunId,
    saves: Sequence[PartialSnapshot],
    place_of: Callable[[PartialSnapshot], SavePlace],
) -> SavedRun:
    """Return the run of these saves, the last of which is the newest."""
    placed = [(one.save[0], start_of(one.save[1]), place_of(one)) for one in saves]
    starts = (start for _, start, place in placed if place.in_run_dir)
    steps = (step for step, _, place in placed if not place.in_run_dir)
    return SavedRun(
        id=run,
        places=tuple(dict.fromkeys(place.name for *_, place in placed)),
        start=max(start for _, start, _ in placed),
        start_in_run_dir=max(starts, default=0),
        step_elsewhere=max(steps, default=0),
        step=saves[-1].save[0],
        settings=_settings_of(saves[-1], place_of(saves[-1])),
    )


def _settings_of(save: PartialSnapshot, place: SavePlace) -> Mapping[str, Any]:
    where = f"run in step {save.save[0]} in {place.name}"
    return as_kind(save.host.get("run", {}), "a table", where=where)


def decide(claim: Claim, found: Sequence[SavedRun]) -> Decision:
    """Return the run of this start. Raises OtherRun if the saves forbid it."""
    adopted = None
    if claim.own is not None:
        _check_asked(claim, claim.own)
    else:
        adopted = _adopted(claim, found)
    own = claim.own or _first_identity(claim, adopted)
    for saved in found:
        if not own.owns(saved.id):
            raise _another(claim, own, saved)
    newest = max(found, key=lambda saved: saved.start, default=None)
    if newest is None or newest.start < own.after + claim.lease:
        return Decision(run=own, adopted=adopted)
    is_own = claim.own is not None and newest.id == own.id
    is_elsewhere = newest.start > newest.start_in_run_dir
    if is_own and is_elsewhere and claim.adopt is None:
        raise _newer_elsewhere(claim, newest)
    return Decision(run=replace(own, after=newest.start), adopted=adopted)


def check_may_adopt(claim: Claim, found: Sequence[SavedRun]) -> None:
    """Raise OtherRun if a saved run differs in what an adopted run keeps.

    Other settings may be those of an earlier start of the run.
    """
    for saved in found:
        if not claim.may_adopt(saved):
            raise _other_settings(claim, saved)


def _first_identity(claim: Claim, adopted: SavedRun | None = None) -> RunIdentity:
    """Return the identity for a directory without one.

    `adopted` is known only once saves were found.
    """
    if adopted is None and claim.adopt is not None:
        run, is_older = claim.adopt, claim.adopt == OLDER
    else:
        run = UNIDENTIFIED if adopted is None else adopted.id
        is_older = adopted is not None or not claim.is_new
    if run not in (UNIDENTIFIED, OLDER) and is_id(run):
        return RunIdentity(id=run)
    return RunIdentity(id=id_for_older(claim.fresh) if is_older else claim.fresh)


def _adopted(claim: Claim, found: Sequence[SavedRun]) -> SavedRun | None:
    """Return the saved run to resume in a directory without an identity.

    None means the directory's own run.
    """
    older = [saved for saved in found if saved.id == UNIDENTIFIED]
    others = [saved for saved in found if saved.id != UNIDENTIFIED]
    if claim.adopt is not None:
        asked = UNIDENTIFIED if claim.adopt == OLDER else claim.adopt
        chosen = next((saved for saved in found if saved.id == asked), None)
        if chosen is None:
            raise _nothing_to_adopt(claim, found)
        return chosen
    if not found:
        return None
    if not others and not claim.is_new:
        _check_may_be_its_own(claim, *older)
        return None
    if len(others) > 1 or (older and not _hold_older(others)):
        raise _several(claim, found)
    (saved,) = others or older
    if not claim.may_adopt(saved):
        raise _other_settings(claim, saved)
    if saved in older or not claim.is_new:
        raise _may_be_another(claim, saved)
    if claim.unlike(saved):
        raise _other_settings(claim, saved)
    return saved


def _check_may_be_its_own(claim: Claim, saved: SavedRun) -> None:
    """Raise OtherRun if directory and saves, both without identity, do not match."""
    if not claim.may_adopt(saved):
        raise _other_settings(claim, saved)
    if saved.step_elsewhere > claim.last_step:
        raise _may_be_another(claim, saved)


def _hold_older(others: Sequence[SavedRun]) -> bool:
    """Return whether saves without an identity may belong to the `others`.

    They may if all of these runs began before runs had identities.
    """
    return all(began_before_identities(saved.id) for saved in others)


def _check_asked(claim: Claim, own: RunIdentity) -> None:
    asks_for_older = claim.adopt == OLDER and began_before_identities(own.id)
    if claim.adopt in (None, own.id) or asks_for_older:
        return
    raise OtherRun(
        got=f"--adopt {claim.adopt}, but run directory {claim.run_dir!r} holds "
        f"{named(own.id)}",
        allowed=f"--adopt {own.id} there, or a directory without a run",
        fix="leave --adopt out to resume that run, or give another --run-dir",
    )


def _nothing_to_adopt(claim: Claim, found: Sequence[SavedRun]) -> OtherRun:
    there = "; ".join(map(str, found)) or "none"
    fix = "leave --adopt out"
    if not found:
        fix += ", or give the --checkpoint.local or --checkpoint.cloud that the run "
        fix += "has saved to"
    for saved in filter(claim.may_adopt, found[:1]):
        fix += f", or give --adopt {_asked(saved.id)}"
    return OtherRun(
        got=f"--adopt {claim.adopt}, but no checkpoint of that run was found",
        allowed=f"a run with checkpoints in the folders or the store: {there}",
        fix=fix,
    )


def _several(claim: Claim, found: Sequence[SavedRun]) -> OtherRun:
    return OtherRun(
        got=f"checkpoints of {len(found)} runs: {'; '.join(map(str, found))}; run "
        f"directory {claim.run_dir!r} does not say which is its own",
        allowed=_ALLOWED,
        fix=f"{_OTHER_FOLDERS}, so that one run is left",
    )


def _may_be_another(claim: Claim, saved: SavedRun) -> OtherRun:
    last = "" if claim.is_new else f", which ends at step {claim.last_step},"
    return OtherRun(
        got=f"checkpoints of {saved}, but run directory {claim.run_dir!r}{last} does "
        "not say that it belongs to that run",
        allowed=_ALLOWED,
        fix=f"add --adopt {_asked(saved.id)} to resume it under the settings of this "
        f"command, or {_OTHER_FOLDERS}",
    )


def _other_settings(claim: Claim, saved: SavedRun) -> OtherRun:
    here, names = {**claim.settings, **claim.hashes}, claim.unlike(saved)
    shown = ", ".join(
        f"{name} = {saved.settings[name]} (here {here[name]})" for name in names
    )
    fix = _OTHER_FOLDERS
    if claim.is_new:
        fix += f"; or resume {named(saved.id)} under its settings "
        fix += f"({_its_settings(claim, saved)})"
    if claim.may_adopt(saved):
        fix += f", or resume it under these (--adopt {_asked(saved.id)})"
    state = "is new" if claim.is_new else "does not say that it belongs to that run"
    return OtherRun(
        got=f"checkpoints of {saved}, which differs from this run: {shown}; run "
        f"directory {claim.run_dir!r} {state}",
        allowed=_ALLOWED,
        fix=fix,
    )


def _its_settings(claim: Claim, saved: SavedRun) -> str:
    """Return what to give so that this run is like the saved one: options, its text."""
    names = claim.unlike(saved)
    settings = {n: saved.settings[n] for n in names if n in claim.settings}
    typed = [as_options(settings)] * bool(settings)
    if saved.id == UNIDENTIFIED:
        typed.append(f"--adopt {OLDER}")
    files = claim.hashes.keys() & {*names}
    if files - {BASE}:
        typed.append("its text")
    if BASE in files:
        typed.append("its frozen weights")
    return " ".join(typed)


def _another(claim: Claim, own: RunIdentity, saved: SavedRun) -> OtherRun:
    return OtherRun(
        got=f"checkpoints of {saved}; run directory {claim.run_dir!r} holds "
        f"{named(own.id)}",
        allowed=_ALLOWED,
        fix=f"{_OTHER_FOLDERS}, or resume that run in its own --run-dir",
    )


def _newer_elsewhere(claim: Claim, saved: SavedRun) -> OtherRun:
    why = "this is a copy of the directory in which the run continued"
    if claim.lease == 1:
        why = f"its .lease is missing, or {why}"
    return OtherRun(
        got=f"checkpoints of {saved} from a later start than any in run directory "
        f"{claim.run_dir!r}: {why}",
        allowed="the directory in which the run was started last",
        fix="resume in that directory; or let this one take over from step "
        f"{saved.step} (--adopt {saved.id}), and stop using the other",
    )


def _asked(run: RunId) -> str:
    return run or OLDER
