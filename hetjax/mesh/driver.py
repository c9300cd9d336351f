# SPDX-License-Identifier: Apache-2.0
"""Asks NVIDIA's driver for its cards, without JAX.

Owns the query and the parsing of the answer. Does not own its uses
(`hetjax/diagnosis/`, `hetjax/profiling/`, `hetjax/launchers/`).
"""

import subprocess
from dataclasses import dataclass

_ASKED = "uuid,name,memory.total,mig.mode.current,compute_cap,driver_version"
_COMMAND = ("nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader,nounits")
_LIMIT_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One card; `compute_capability` as in 8.6, `driver` as in 550.54.15.

    `memory_gib` is 0 if the driver does not report it. A card that `is_cut` is split
    into instances (MIG).
    """

    uuid: str
    name: str
    memory_gib: float
    is_cut: bool
    compute_capability: str
    driver: str


def driver_cards() -> tuple[Card, ...]:
    """Return the cards that the driver shows; none if it does not answer in time."""
    try:
        done = subprocess.run(
            _COMMAND, capture_output=True, text=True, timeout=_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return read_cards(done.stdout)


def read_cards(text: str) -> tuple[Card, ...]:
    """Read the lines of nvidia-smi; lines of another form are left out.

    >>> read_cards("GPU-1a2b, Tesla T4, 15360, [N/A], 7.5, 550.54.15")[0].memory_gib
    15.0
    """
    rows = (tuple(map(str.strip, line.split(","))) for line in text.splitlines())
    return tuple(
        Card(
            uuid=uuid,
            name=name,
            memory_gib=int(mebibytes) / 1024 if mebibytes.isdigit() else 0.0,
            is_cut=mode == "Enabled",
            compute_capability=capability,
            driver=driver,
        )
        for uuid, name, mebibytes, mode, capability, driver in (
            row for row in rows if len(row) == 6
        )
    )
