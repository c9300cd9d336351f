# SPDX-License-Identifier: Apache-2.0
"""What NVIDIA's driver says of its cards, without JAX.

Owns the question and how its answer is read. Does not own what follows from it
(`hetjax/diagnosis/`, `hetjax/profiling/`).
"""

import subprocess
from dataclasses import dataclass

_ASKED = "name,memory.total,compute_cap,driver_version"
_COMMAND = ("nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader,nounits")
_LIMIT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One card; `compute_capability` as in 8.6, `driver` as in 550.54.15."""

    name: str
    memory_gib: float
    compute_capability: str
    driver: str


def driver_cards() -> tuple[Card, ...]:
    """Return the cards that the driver shows; none where it does not answer in 5 s."""
    try:
        told = subprocess.run(
            _COMMAND, capture_output=True, text=True, timeout=_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return read_cards(told.stdout)


def read_cards(text: str) -> tuple[Card, ...]:
    """Read the lines of nvidia-smi; those that are otherwise are left out.

    >>> read_cards("Tesla T4, 15360, 7.5, 550.54.15").__len__()
    1
    """
    rows = (tuple(map(str.strip, line.split(","))) for line in text.splitlines())
    return tuple(
        Card(
            name=row[0],
            memory_gib=float(row[1]) / 1024,
            compute_capability=row[2],
            driver=row[3],
        )
        for row in rows
        if len(row) == 4 and row[1].isdigit()
    )
