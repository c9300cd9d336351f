# SPDX-License-Identifier: Apache-2.0
"""What an attack is, and what comes of one.

Owns the form of both. Does not own the attacks (`on_wire.py`, `on_files.py`,
`on_workers.py`), nor the lines that are kept of them (`__main__.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What happened, in words, and whether that was to be expected.

    `wrong` is what was not, empty if the attack was withstood. `seconds` are of what
    the finding was about, where it was about time.
    """

    happened: str
    wrong: tuple[str, ...] = ()
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """One of the findings of the notes, done again; `act` does it in a folder."""

    finding: str
    done: str
    expected: str
    act: Callable[[Path], Outcome]


def unless(**conditions: bool) -> tuple[str, ...]:
    """The names of what does not hold, with blanks for underscores.

    >>> unless(it_ends=True, it_says_why=False)
    ('not so: it says why',)
    """
    return tuple(
        f"not so: {name.replace('_', ' ')}"
        for name, holds in conditions.items()
        if not holds
    )
