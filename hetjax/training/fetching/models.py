# SPDX-License-Identifier: Apache-2.0
"""Brings the controller's model folders to a machine that may not see them.

A worker reads only the tensors of its own layers. So it fetches only the pieces of
weight files with these, when it first reads them. That takes as long as the bytes of
its layers at the bandwidth of the path from the controller, divided by the workers that
fetch at once. The pieces stay in the worker's cache, in sparse files. Later starts, and
machines that have a copy of the folder under the same path, send the hash of each piece
and get it again only if it differs. A machine that sees the run directory fetches
nothing if the path exists there, too.

Owns what is fetched, and where it is kept. Does not own what is read of it
(`models/hugging_face/`), nor the transfer (`comm/files/`).
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from hetjax.comm.files.pieces import PIECE_BYTES
from hetjax.comm.files.taker import FileTaker, GiverPlace
from hetjax.data.hugging_face import FILES
from hetjax.files.mirrors import Bring, meant_by, stand_for
from hetjax.models.hugging_face.adapter_config import has_adapters, read_adapter_config
from hetjax.models.hugging_face.hub import local_folder
from hetjax.models.named import is_function, is_path
from hetjax.names import inside
from hetjax.training.settings.config import RunConfig

_WEIGHTS = ".safetensors"
_LENGTH_BYTES = 8  # hold the length of the header of a weight file
# a process makes one call to its giver at a time, from whichever thread reads
_one_call = threading.RLock()


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A model folder or file of the controller: its name as typed, and its files.

    `place` has the last parts of its path, from which the model gets its name. `files`
    has sizes in bytes, by name within the folder; `stamp` changes when the files do.
    """

    name: str
    prefix: str  # before the names under which its files are given
    place: Sequence[str]
    is_file: bool
    files: Mapping[str, int]
    stamp: str


def model_sources(config: RunConfig) -> list[tuple[ModelSource, dict[str, Path]]]:
    """Return the sources of a run's models, each with its files by given name."""
    found = []
    for number, (name, path) in enumerate(_named(config).items()):
        prefix = f"models/{number}/"
        paths = {path.name: path} if path.is_file() else dict(_files_in(path))
        stats = {name: path.stat() for name, path in paths.items()}
        sizes = [(n, s.st_size, s.st_mtime_ns) for n, s in sorted(stats.items())]
        real = path.resolve()
        source = ModelSource(
            name=name,
            prefix=prefix,
            place=[real.parent.name, real.name] if path.is_file() else [real.name],
            is_file=path.is_file(),
            files={name: stat.st_size for name, stat in stats.items()},
            stamp=sha256(f"{real} {sizes}".encode()).hexdigest()[:16],
        )
        found.append((source, {prefix + name: p for name, p in paths.items()}))
    return found


def _named(config: RunConfig) -> dict[str, Path]:
    """Return the run's model folders and files, by the name in its settings."""
    found: dict[str, Path] = {}
    if not is_function(config.model) and is_path(config.model):
        found[str(config.model)] = Path(config.model)
    if config.init is not None:
        found[config.init] = folder = local_folder(config.init)
        if has_adapters(folder):
            base = read_adapter_config(folder).base
            found[base] = local_folder(base)
    return found


def _files_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files of a folder that are read: its weights and their configs."""
    for path in sorted(folder.iterdir()):
        is_read = path.suffix == _WEIGHTS or path.suffix == ".json"
        if is_read and path.name not in FILES and path.is_file():
            yield path.name, path


def use_models(
    sources: Sequence[Mapping[str, Any]],
    cache_dir: Path,
    giver: GiverPlace | None,
    sees_run: bool,
) -> None:
    """Let names of models mean the controller's models.

    `sources` are `ModelSource`s as JSON. If this machine `sees_run`, a path that exists
    here is the same as the controller's. Raises OSError.
    """
    for each in sources:
        source = ModelSource(**each)
        is_here = sees_run and Path(source.name).expanduser().exists()
        if giver is None or is_here or meant_by(source.name) is not None:
            continue
        _use(source, cache_dir, giver)


def _use(source: ModelSource, cache_dir: Path, giver: GiverPlace) -> None:
    top = inside(cache_dir, f"models-{source.stamp}", *source.place)
    folder = top.parent if source.is_file else top
    folder.mkdir(parents=True, exist_ok=True)
    partly: dict[Path, Bring] = {}
    for name, size in source.files.items():
        path = inside(folder, name)
        own = Path(source.name).expanduser()
        file = _PartOfFile(
            name=source.prefix + name,
            path=path,
            size=size,
            twin=own if source.is_file else own / name,
            giver=giver,
        )
        if path.suffix == _WEIGHTS:
            file.bring_header()
            partly[path] = file.bring
        else:
            file.bring(0, size)
    print(
        f"models: what is read of {source.name} comes from the controller, into {top}",
        flush=True,
    )
    stand_for(source.name, top, partly)


@dataclass(kw_only=True, slots=True)
class _PartOfFile:
    """A file of which only parts are here; the local file `twin` may be the same file.

    This process checks each piece before it first uses it.
    """

    name: str
    path: Path
    size: int
    twin: Path
    giver: GiverPlace
    _checked: set[int] = field(default_factory=set)  # pieces by number

    def bring_header(self) -> None:
        """Bring the header of a weight file: which tensors it has, and where."""
        self.bring(0, _LENGTH_BYTES)
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        self.bring(0, min(self.size, _LENGTH_BYTES + length))

    def bring(self, start: int, end: int) -> None:
        """Bring the bytes from start to end, unless they are here. Raises OSError."""
        first, last = start // PIECE_BYTES, -(-min(end, self.size) // PIECE_BYTES)
        with _one_call:
            wanted = [n for n in range(first, last) if n not in self._checked]
            if wanted or not self.path.exists():
                self._bring(wanted)
            self._checked.update(wanted)

    def _bring(self, wanted: Sequence[int]) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if os.fstat(descriptor).st_size != self.size:
                os.ftruncate(descriptor, self.size)
            with FileTaker(self.giver) as taker:
                for start, end in self._runs(wanted):
                    have = partial(self._here, descriptor)
                    for at, data in taker.pieces(self.name, start, end, have):
                        _write(descriptor, at, data)
        finally:
            os.close(descriptor)

    def _runs(self, wanted: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the start and end in bytes of each run of consecutive pieces."""
        for at, number in enumerate(wanted):
            if at == 0 or wanted[at - 1] != number - 1:
                start = number
            if at + 1 == len(wanted) or wanted[at + 1] != number + 1:
                yield start * PIECE_BYTES, min(self.size, (number + 1) * PIECE_BYTES)

    def _here(self, descriptor: int, start: int, end: int) -> bytes | None:
        """Return local bytes that may be the same, of an earlier start or the twin."""
        found = os.pread(descriptor, end - start, start)
        if np.frombuffer(found, np.uint8).any():
            return found
        try:
            with self.twin.open("rb") as file:
                if os.fstat(file.fileno()).st_size == self.size:
                    return os.pread(file.fileno(), end - start, start)
        except OSError:
            pass  # the twin is missing or unreadable: the piece is fetched
        return None


def _write(descriptor: int, at: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count
