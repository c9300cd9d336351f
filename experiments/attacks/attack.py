# SPDX-License-Identifier: Apache-2.0
"""Defines an attack and its outcome.

Owns both types. Does not own the attacks (`on_wire.py`, `on_files.py`,
`on_workers.py`), nor their result lines (`__main__.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What happened, in words, and whether that was expected.

    `wrong` lists what was not expected; it is empty if the attack was withstood.
    `seconds` measure what the finding was about, if that was a time.
    """

    happened: str
    wrong: tuple[str, ...] = ()
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """One of the findings of the notes, repeated; `act` does it in a folder."""

    finding: str
    done: str
    expected: str
    act: Callable[[Path], Outcome]


def unless(**conditions: bool) -> tuple[str, ...]:
    """Return the names of conditions that do not hold, with blanks for underscores.

    >>> unless(it_ends=True, it_says_why=False)
    ('not so: it says why',)
    """
    return tuple(
        f"not so: {name.replace('_', ' ')}"
        for name, holds in conditions.items()
        if not holds
    )
