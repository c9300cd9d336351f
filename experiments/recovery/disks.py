# SPDX-License-Identifier: Apache-2.0
"""Damages files on the workers' disks, and determines which leaves are left.

    DISKS/<worker>/step_00000001/<saver>/{manifest.json, state/...}

Owns the kinds of damage, a pristine copy for repairs, and the choice of undamaged
leaves: those whose files are all as they were. Does not use checksums, so that it can
check what hetjax finds.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hetjax.checkpoint.format import MANIFEST, step_directory, step_numbers

_FILES = ("chunk", "zarr.json", "manifest.json", "orbax file")
_ACTIONS = ("flip", "truncate", "remove")
_FOLDERS = ("leaf folder", "part")
_MOST_HITS = 3

Holders = dict[str, set[str]]  # by leaf, the workers whose disks have it


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What is damaged, and how."""

    target: str
    action: str

    def __str__(self) -> str:
        return f"{self.action} {self.target}"


KINDS = tuple(
    [Kind(target=target, action=action) for target in _FILES for action in _ACTIONS]
    + [Kind(target=target, action="remove") for target in _FOLDERS]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What `saver` saved of a step, as the disk of `worker` has it."""

    worker: str
    step: int
    saver: str

    def within(self, disks: Path) -> Path:
        return step_directory(disks / self.worker, self.step) / self.saver


@dataclass(frozen=True, slots=True)
class Disks:
    """The disks of all workers, and a copy of them that stays unchanged."""

    root: Path
    pristine: Path

    @classmethod
    def copied(cls, root: Path, pristine: Path) -> "Disks":
        shutil.copytree(root, pristine)
        return cls(root, pristine)

    def own_parts(self) -> list[Part]:
        """Return the parts that each worker saved itself."""
        return [
            Part(worker=manifest.parts[-4], step=step, saver=manifest.parts[-2])
            for disk in sorted(self.pristine.iterdir())
            for step in step_numbers(disk)
            for manifest in step_directory(disk, step).glob("*/manifest.json")
        ]

    def copy(self, part: Part, worker: str) -> Part:
        """Put a part on another worker's disk, too."""
        other = Part(worker=worker, step=part.step, saver=part.saver)
        shutil.copytree(part.within(self.root), other.within(self.root))
        return other

    def remove(self, part: Part) -> None:
        """Remove a part from a disk."""
        shutil.rmtree(part.within(self.root), ignore_errors=True)

    def mend(self, part: Part) -> None:
        """Restore a worker's own part."""
        self.remove(part)
        shutil.copytree(self._as_saved(part), part.within(self.root))

    def harm(self, parts: Iterable[Part], kind: Kind, random_: random.Random) -> None:
        """Damage a few files or folders of a kind, anywhere in these parts."""
        found = sorted(
            path for part in parts for path in _targets(part.within(self.root), kind)
        )
        number = min(len(found), random_.randint(1, _MOST_HITS))
        for path in random_.sample(found, number):
            _harm(path, kind.action, random_)

    def saved(self, parts: Iterable[Part]) -> Holders:
        """Return the holders of each leaf of these parts if nothing was damaged."""
        return _holders(
            parts, lambda part: [f.name for f in _leaf_folders(self._as_saved(part))]
        )

    def left(self, parts: Iterable[Part]) -> Holders:
        """Return the holders of each undamaged leaf of these parts."""
        return _holders(parts, self._leaves_left)

    def _leaves_left(self, part: Part) -> Iterator[str]:
        now, before = part.within(self.root), self._as_saved(part)
        if _json(now / MANIFEST) != _json(before / MANIFEST):
            return
        for leaf in _leaf_folders(before):
            files = [file.relative_to(before) for file in _files(leaf)]
            if all(_bytes(now / f) == _bytes(before / f) for f in files):
                yield leaf.name

    def _as_saved(self, part: Part) -> Path:
        return replace(part, worker=part.saver).within(self.pristine)


def _holders(
    parts: Iterable[Part], leaves_of: Callable[[Part], Iterable[str]]
) -> Holders:
    found: Holders = {}
    for part in parts:
        for leaf in leaves_of(part):
            found.setdefault(leaf, set()).add(part.worker)
    return found


def _targets(part: Path, kind: Kind) -> list[Path]:
    found: dict[str, Callable[[], Iterator[Path]]] = {
        "chunk": lambda: (p for p in _leaf_files(part) if p.name != "zarr.json"),
        "zarr.json": lambda: (p for p in _leaf_files(part) if p.name == "zarr.json"),
        "manifest.json": lambda: part.glob(MANIFEST),
        "orbax file": lambda: (p for p in part.glob("*/*") if p.is_file()),
        "leaf folder": lambda: _leaf_folders(part),
        "part": lambda: iter([part]),
    }
    return [*found[kind.target]()]


def _harm(path: Path, action: str, random_: random.Random) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif action == "remove":
        path.unlink()
    elif action == "truncate":
        size_bytes = path.stat().st_size
        with path.open("r+b") as file:
            file.truncate(random_.choice([0, size_bytes // 2, size_bytes - 1]))
    else:
        content = bytearray(path.read_bytes())
        content[random_.randrange(len(content))] ^= random_.randrange(1, 256)
        path.write_bytes(content)


def _leaf_folders(part: Path) -> Iterator[Path]:
    return (path for path in part.glob("*/*") if path.is_dir())


def _leaf_files(part: Path) -> Iterator[Path]:
    return (file for leaf in _leaf_folders(part) for file in _files(leaf))


def _files(leaf: Path) -> Iterator[Path]:
    return (path for path in leaf.rglob("*") if path.is_file())


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _json(path: Path) -> object:
    """Return what a file says, whatever its white space; None if it is no JSON."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
