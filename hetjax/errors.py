# SPDX-License-Identifier: Apache-2.0
"""Defines the errors that users cause and can fix. Every room may import this file."""

import difflib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

_LONGEST_PART = 4_000  # characters


class _InThreeParts(Exception):
    """`got` says what was found (with numbers), `allowed` what would be accepted, `fix`
    what to type or change."""

    def __init__(self, *, got: str, allowed: str, fix: str) -> None:
        got, allowed, fix = map(_printable, (got, allowed, fix))
        super().__init__(f"got: {got}\nallowed: {allowed}\nfix: {fix}")
        self.got, self.allowed, self.fix = got, allowed, fix


def _printable(text: str) -> str:
    """Return the text as any terminal can show it, whatever a file has put into it."""
    if len(text) > _LONGEST_PART:
        text = f"{text[:_LONGEST_PART]}..."
    return text.encode(errors="backslashreplace").decode()


class BadInput(_InThreeParts, ValueError):
    """Bad user input; command lines turn it into exit code 2.

    Broken invariants of hetjax are `assert`s, never this.
    """

    exit_code = 2


class NoFeasiblePlan(_InThreeParts, ValueError):
    """Valid input that no plan can satisfy; command lines turn it into exit code 3.

    `got` names the limit that binds.
    """

    exit_code = 3


class RunFailed(_InThreeParts):
    """A run that cannot continue; earlier checkpoints are intact."""

    exit_code = 1


def counted_noun(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1.

    >>> counted_noun(1, "device"), counted_noun(1_200, "row")
    ('1 device', '1,200 rows')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first names as text, and how many more there are.

    >>> listed(["a", "b"]), listed(["a", "b", "c"], most=2)
    ('a, b', 'a, b and 1 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@contextmanager
def placed(where: str) -> Iterator[None]:
    """Prefix a BadInput of the enclosed code with the place `where` it arose."""
    try:
        yield
    except BadInput as bad:
        got = f"{where}: {bad.got}"
        raise BadInput(got=got, allowed=bad.allowed, fix=bad.fix) from bad


_NUM_FIRST = 12  # words to suggest if none is similar


def did_you_mean(word: str, words: Collection[str], *, most: int = 1) -> str:
    """Return "did you mean 'x'?" or, if no word is similar, the first words to try."""
    near = difflib.get_close_matches(word, list(words), n=most)
    named = ", ".join(map(repr, near))
    first = [*list(words)[:_NUM_FIRST], *["..."] * (len(words) > _NUM_FIRST)]
    return f"did you mean {named}?" if near else f"use one of {', '.join(first)}"
