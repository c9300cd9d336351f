# SPDX-License-Identifier: Apache-2.0
"""Reads checkpoints from disk, whatever plan and workers wrote them.

Owns the test whether a step is complete, the union of the workers' manifests, and
reading an entry after checking the checksum of each of its files. Does not own writing
(`writer.py`) nor the destination of the values (`hetjax/runtime/execution/state.py`).

Arrays are read with TensorStore, the library under Orbax. Orbax restores the same trees
(`PyTreeRestore`), but takes 5.5 times as long for 127 leaves (3 MB: 95 instead of 17
ms) and 3.4 times for 205 (205 MB: 0.45 instead of 0.13 s). Entry by entry it takes 36
times as long, since it reads the description of the whole tree each time. (All are
medians of 7 and 5 alternating rounds, two cores.) Orbax also refuses older saves, in
which a slice of zeros has no file.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from hetjax.checkpoint.file_records import (
    FileRecord,
    NotAsWritten,
    read_checked,
    size_mismatch,
)
from hetjax.checkpoint.format import (
    EARLIER,
    MANIFEST,
    Entry,
    Manifest,
    attempt,
    from_text,
    other_model,
    read_manifest_text,
    split_leaves,
    step_directory,
    step_numbers,
)
from hetjax.checkpoint.run_identity import UNIDENTIFIED, RunId, RunIdentity, is_ours
from hetjax.checkpoint.signing import NotSigned
from hetjax.errors import BadInput
from hetjax.names import UnsafeName, inside

_NUM_NAMED = 3  # differences that an error spells out


class DamagedCheckpoint(BadInput):
    """A checkpoint whose files differ from what its manifests say."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One slice on disk and the records of its files."""

    path: Path
    files: dict[Path, FileRecord] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """One save of one step; `host` is the training loop's JSON.

    `path` is the directory of the step, `entries` are keyed by name. `absent` names
    workers that took part in the save but whose parts are not here.
    """

    step: int
    path: Path
    host: Mapping[str, Any]
    entries: Mapping[str, Entry]
    leaves: Mapping[str, Leaf] = field(repr=False)
    absent: frozenset[str] = frozenset()
    run: RunId = UNIDENTIFIED

    @property
    def attempt(self) -> str:
        """The attempt of this save: a run may save a step more than once."""
        return attempt(self.host)

    @classmethod
    def open(
        cls,
        directory: Path,
        step: int | None = None,
        key: bytes | None = None,
        run: RunIdentity | None = None,
    ) -> "Checkpoint":
        """Open a step of a run, or its newest complete one as `newest` does.

        With a key, reads only what is signed with it; without `run`, accepts any run.
        Raises BadInput if there is no such step, DamagedCheckpoint naming a damaged
        file.
        """
        if step is None:
            found = newest(directory, key, run)
        else:
            path = step_directory(directory, step)
            manifests = _manifests(path, key, run)
            found = merge(path, manifests) if manifests else None
        if found is None:
            raise _no_checkpoint(directory, step, steps(directory, key, run))
        return found

    def read(self, entry: Entry, dtype: np.dtype | None = None) -> np.ndarray:
        """Return the whole value of the entry, as `dtype` if given.

        Checks its files first. Reads slice by slice, which takes little more memory
        than the result. Raises BadInput if the checkpoint lacks the entry, or has it
        with another shape or dtype. Raises DamagedCheckpoint naming a file that differs
        from its record.
        """
        saved = self.entries.get(entry.name)
        if saved is None or _kind(saved) != _kind(entry):
            raise _other_model(self, [_difference(saved, entry)])
        value = np.empty(saved.shape, dtype or saved.dtype)
        parts = replace(saved, dtype=value.dtype)
        for name, part in split_leaves(parts, value):
            (found,) = self.read_leaves([name])
            if found.shape != part.shape:
                wrong = f"the slice {name} is {found.shape}, not {part.shape}"
                raise _damaged(self.path, wrong)
            part[...] = found
        return value

    def read_leaves(self, names: Sequence[str]) -> list[np.ndarray]:
        """Return the values of some slices, from the very bytes that were checked.

        Raises DamagedCheckpoint naming a slice that no worker saved, or a file that
        differs from its record.
        """
        leaves = [self.leaf(name) for name in names]
        try:
            checked = [_checked(leaf) for leaf in leaves]
        except NotAsWritten as wrong:
            raise _damaged(self.path, str(wrong)) from wrong
        spec = {"driver": "zarr3"}
        opened = [ts.open(spec, kvstore=one, open=True, read=True) for one in checked]
        try:
            reads = [array.result().read() for array in opened]
            return [value.result() for value in reads]
        except ValueError as error:  # the checked files are not a whole array
            raise _damaged(self.path, f"{names[0]}: {error}") from error

    def check_same_kind(self, expected: Iterable[Entry]) -> None:
        """Raise BadInput if an expected entry has another shape or dtype here."""
        differences = [
            _difference(self.entries[entry.name], entry)
            for entry in expected
            if entry.name in self.entries
            and _kind(self.entries[entry.name]) != _kind(entry)
        ]
        if differences:
            raise _other_model(self, differences)

    def leaf(self, name: str) -> Leaf:
        """Return where a slice lies; raises DamagedCheckpoint if no worker saved it."""
        if name not in self.leaves:
            raise _damaged(self.path, f"no worker saved the slice {name}")
        return self.leaves[name]


def newest(
    directory: Path, key: bytes | None = None, run: RunIdentity | None = None
) -> Checkpoint | None:
    """Return the newest complete checkpoint; None if no save was ever committed.

    Warns about each newer one that is damaged; raises DamagedCheckpoint if all are.
    """
    damages: list[DamagedCheckpoint] = []
    for step in reversed(step_numbers(directory)):
        path = step_directory(directory, step)
        try:
            manifests = _manifests(path, key, run)
        except DamagedCheckpoint as error:
            damages.append(error)
            continue
        if manifests:
            for damage in damages:
                warnings.warn(f"skipped: {damage.got}", stacklevel=2)
            return merge(path, manifests)
    if len(damages) > 1:  # of untrusted ones only the first's own advice helps
        first = damages[0]
        got = f"none of {len(damages)} steps can be used; the newest: {first.got}"
        raise DamagedCheckpoint(got=got, allowed=first.allowed, fix=first.fix)
    if damages:
        raise damages[0]
    return None


def partial_checkpoints(directory: Path, key: bytes | None = None) -> list[Checkpoint]:
    """Return what this disk has of each save of each step, complete or not.

    It may hold the parts of some workers only. Slices with a missing file, or one of
    wrong size, are left out. Unusable manifests and saves are skipped with a warning.
    """
    found = []
    for step in step_numbers(directory):
        path = step_directory(directory, step)
        for manifests in _by_save(_readable(path, key)):
            try:
                union = merge(path, manifests)
            except DamagedCheckpoint as damage:
                warnings.warn(f"skipped: {damage.got}", stacklevel=2)
                continue
            found.append(replace(union, leaves=_of_right_size(union.leaves)))
    return found


def _by_save(manifests: Iterable[Manifest]) -> list[list[Manifest]]:
    """Group the manifests of a step by save (attempt and run), ascending."""
    found: dict[tuple[str, RunId], list[Manifest]] = {}
    for manifest in manifests:
        found.setdefault((attempt(manifest.host), manifest.run), []).append(manifest)
    return [found[save] for save in sorted(found)]


def _readable(path: Path, key: bytes | None) -> list[Manifest]:
    found = []
    for file in _manifest_files(path):
        try:
            found.append(_manifest(path, file, key))
        except DamagedCheckpoint as damage:
            warnings.warn(f"skipped: {damage.got}", stacklevel=2)
    return found


def _of_right_size(leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    return {
        name: leaf
        for name, leaf in leaves.items()
        if not any(size_mismatch(path, wanted) for path, wanted in leaf.files.items())
    }


def steps(
    directory: Path, key: bytes | None = None, run: RunIdentity | None = None
) -> list[int]:
    """Return complete steps, ascending: every manifest exists, every size is right."""
    found = []
    for step in step_numbers(directory):
        with suppress(DamagedCheckpoint):
            if _manifests(step_directory(directory, step), key, run):
                found.append(step)
    return found


def _manifests(
    path: Path, key: bytes | None, run: RunIdentity | None
) -> list[Manifest]:
    """Return the manifests of all workers of a step; empty if no save is complete.

    Of several saves of the step, returns the latest. Raises DamagedCheckpoint if a
    manifest or the size of a file is wrong.
    """
    files = _manifest_files(path)
    found = (_manifest(path, file, key) for file in files)
    saves = _by_save(manifest for manifest in found if is_ours(run, manifest.run))
    whole = next(filter(None, map(_complete_save, reversed(saves))), [])
    for manifest in whole:
        for name, expected in manifest.files.items():
            if wrong := size_mismatch(path / manifest.worker / name, expected):
                raise _damaged(path, wrong)
    return whole


def _manifest_files(path: Path) -> list[Path]:
    return [
        file for name in (EARLIER, MANIFEST) for file in sorted(path.glob(f"*/{name}"))
    ]


def _complete_save(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Return the manifests whose participating workers are all present."""
    present = {manifest.worker for manifest in manifests}
    return [m for m in manifests if present.issuperset(m.workers)]


def _manifest(path: Path, file: Path, key: bytes | None) -> Manifest:
    try:
        manifest = from_text(read_manifest_text(file), key)
    except NotSigned as unsigned:
        raise _not_trusted(path, f"{file}: {unsigned}") from unsigned
    except (OSError, ValueError) as error:
        why = error.got if isinstance(error, BadInput) else error
        raise _damaged(path, f"{file} cannot be used: {why}") from error
    if file.parent != step_directory(path.parent, manifest.step) / manifest.worker:
        what = f"{file} describes step {manifest.step}, worker {manifest.worker}"
        raise _damaged(path, what)
    return manifest


def merge(path: Path, manifests: Sequence[Manifest]) -> Checkpoint:
    """Return the union of what workers saved of a step, whose directory is `path`.

    Raises DamagedCheckpoint if they disagree.
    """
    entries: dict[str, Entry] = {}
    leaves: dict[str, Leaf] = {}
    for manifest in manifests:
        for entry in manifest.entries:
            if entries.setdefault(entry.name, entry) != entry:
                raise _damaged(path, f"its workers disagree about {entry.name}")
        try:
            own = _leaves(path, manifest)
        except UnsafeName as unsafe:
            raise _damaged(path, unsafe.got) from unsafe
        for name, leaf in own.items():
            other = leaves.setdefault(name, leaf)
            if list(other.files.values()) != list(leaf.files.values()):
                raise _damaged(path, f"{other.path} and {leaf.path} differ")
    first = manifests[0]
    took_part = {worker for manifest in manifests for worker in manifest.workers}
    return Checkpoint(
        step=first.step,
        path=path,
        host=first.host,
        entries=entries,
        leaves=leaves,
        absent=frozenset(took_part - {manifest.worker for manifest in manifests}),
        run=first.run,
    )


def _leaves(path: Path, manifest: Manifest) -> dict[str, Leaf]:
    """Return the leaves of one worker by name, each with its files in sorted order."""
    own = inside(path, manifest.worker)
    leaves: dict[str, Leaf] = {}
    for name, expected in sorted(manifest.files.items()):
        state, leaf, *rest = name.split("/")
        if rest:  # Orbax's own files lie directly in the state directory
            found = leaves.setdefault(leaf, Leaf(own / state / leaf))
            found.files[inside(own, name)] = expected
    return leaves


def _checked(leaf: Leaf) -> ts.KvStore:
    """Load the leaf's files into memory and check them; raises NotAsWritten."""
    found = ts.KvStore.open({"driver": "memory"}, context=ts.Context()).result()
    for path, expected in leaf.files.items():
        found[path.relative_to(leaf.path).as_posix()] = read_checked(path, expected)
    return found


def _kind(entry: Entry) -> str:
    return f"{entry.dtype.name}{list(entry.shape)}"


def _difference(saved: Entry | None, asked: Entry) -> str:
    found = "is missing" if saved is None else f"is {_kind(saved)}"
    return f"{asked.name} {found}, this run's is {_kind(asked)}"


def _other_model(checkpoint: Checkpoint, differences: list[str]) -> BadInput:
    named = "; ".join(differences[:_NUM_NAMED])
    others = len(differences) - _NUM_NAMED
    return other_model(
        f"checkpoint {checkpoint.path}",
        named + (f"; and {others} more" if others > 0 else ""),
        alike=": the same names, shapes and dtypes",
    )


def _damaged(path: Path, what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        got=f"checkpoint {path} is damaged: {what}",
        allowed="files as they were saved",
        fix="restore its files from a copy, or use an earlier step: train does so by "
        "itself, if there is one; sample, eval and export with --step",
    )


def _not_trusted(path: Path, what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        got=f"checkpoint {path} is not trusted: {what}",
        allowed="checkpoints that were written with the key of this run",
        fix="give the --checkpoint.key-file that it was written with, or none if you "
        "trust whoever may write there",
    )


def _no_checkpoint(
    directory: Path, step: int | None, complete: Sequence[int]
) -> BadInput:
    there = ", ".join(map(str, complete)) or "none"
    return BadInput(
        got=f"no complete checkpoint {'' if step is None else f'of step {step} '}"
        f"in {directory}",
        allowed=f"complete steps there: {there}",
        fix="give one of these steps, or another --run-dir",
    )
