# SPDX-License-Identifier: Apache-2.0
"""The errors that users cause and can mend. Every room may import this file."""


class BadInput(ValueError):
    """Bad user input, told in three parts; command lines turn it into exit code 2.

    `got` says what was found (with numbers), `allowed` what would be accepted, `fix`
    what to type or change. Broken invariants of our own are `assert`s, never this.
    """

    exit_code = 2

    def __init__(self, *, got: str, allowed: str, fix: str) -> None:
        super().__init__(f"got: {got}\nallowed: {allowed}\nfix: {fix}")
        self.got, self.allowed, self.fix = got, allowed, fix


class NoFeasiblePlan(ValueError):
    """Good input that no plan can satisfy; command lines turn it into exit code 3.

    The parts are those of `BadInput`; `got` names the limit that binds.
    """

    exit_code = 3

    def __init__(self, *, got: str, allowed: str, fix: str) -> None:
        super().__init__(f"got: {got}\nallowed: {allowed}\nfix: {fix}")
        self.got, self.allowed, self.fix = got, allowed, fix


class Failed(Exception):
    """A run that cannot go on; the text says why, earlier checkpoints are intact."""

    exit_code = 1
