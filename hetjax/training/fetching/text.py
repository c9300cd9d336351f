# SPDX-License-Identifier: Apache-2.0
"""Brings the text of a run to a machine that may not see the controller's files.

Every worker reads the batches of all workers, in the same order, so sooner or later it
needs all tokens. It fetches the whole tokenised text once, before its first step, to
its own cache, where later starts find it by its hashes. That takes as long as its bytes
(2 or 4 per token) at the bandwidth of the path from the controller, divided by the
workers that fetch at once. If the text is visible or was fetched before, only the
hashes are computed. Tokenising the same text again would take far longer.

Owns what is fetched, and that it equals the controller's text to the bit. Does not own
the cache (`data/dataset.py`) nor the transfer (`comm/files/`).
"""

import time
from collections.abc import Mapping
from pathlib import Path

from hetjax.comm.files.taker import FileTaker, GiverPlace, NotGiven
from hetjax.data.dataset import DamagedDataset, Dataset, files_of, kept, load
from hetjax.errors import BadInput

_TEXT = "text/"  # before the names of its files


def text_files(dataset: Dataset) -> dict[str, Path]:
    """Return the files of its text that the controller gives, by name."""
    return {f"{_TEXT}{name}": path for name, path in files_of(dataset).items()}


def text_here(
    directory: Path,
    hashes: Mapping[str, str],
    cache_dir: Path,
    giver: GiverPlace | None,
) -> Dataset:
    """Open the controller's dataset if its directory is here, too, else fetch it.

    Raises BadInput if neither is possible.
    """
    try:
        found = load(directory)
        if found.hashes == hashes:
            return found
        why = f"the text in {directory} differs from the controller's"
    except DamagedDataset as damage:
        why = damage.got
    if giver is None:
        raise _nobody_gives(directory, why)
    try:
        return kept(cache_dir, hashes, lambda name, path: _fetch(giver, name, path))
    except NotGiven as error:
        raise _nobody_gives(directory, f"{why}; {error}") from error


def _fetch(giver: GiverPlace, name: str, path: Path) -> None:
    begun_s = time.monotonic()
    with FileTaker(giver) as taker, path.open("wb") as file:
        for at, data in taker.pieces(f"{_TEXT}{name}", 0, taker.size(f"{_TEXT}{name}")):
            assert at == file.tell(), "pieces come in their order"
            file.write(data)
        size = file.tell()
    took_s = time.monotonic() - begun_s
    print(f"text: fetched {name}, {size:,} bytes in {took_s:.1f} s", flush=True)


def _nobody_gives(directory: Path, why: str) -> BadInput:
    return BadInput(
        got=f"the run's text is not on this machine: {why}",
        allowed="the controller's text on every machine, or a way to fetch it",
        fix=f"copy {directory} to the same place on this machine",
    )
