# SPDX-License-Identifier: Apache-2.0
"""The errors that users cause and can mend. Every room may import this file."""


class _InThreeParts(Exception):
    """`got` says what was found (with numbers), `allowed` what would be accepted, `fix`
    what to type or change."""

    def __init__(self, *, got: str, allowed: str, fix: str) -> None:
        super().__init__(f"got: {got}\nallowed: {allowed}\nfix: {fix}")
        self.got, self.allowed, self.fix = got, allowed, fix


class BadInput(_InThreeParts, ValueError):
    """Bad user input; command lines turn it into exit code 2.

    Broken invariants of our own are `assert`s, never this.
    """

    exit_code = 2


class NoFeasiblePlan(_InThreeParts, ValueError):
    """Good input that no plan can satisfy; command lines turn it into exit code 3.

    `got` names the limit that binds.
    """

    exit_code = 3


class RunFailed(_InThreeParts):
    """A run that cannot go on; earlier checkpoints are intact."""

    exit_code = 1
