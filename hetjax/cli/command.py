# SPDX-License-Identifier: Apache-2.0
"""What all commands have in common: exit codes, and the last words of errors.

Owns the way from a command's function to the `main` of its module. Does not own any
command, nor what errors say.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from hetjax.errors import BadInput, Failed, NoFeasiblePlan


class Main(Protocol):
    """Runs a command and gives its exit code; without arguments with the process's."""

    def __call__(self, arguments: Sequence[str] | None = None) -> int: ...


def main_of(
    command: Callable[[Sequence[str]], int | None],
    goes_on: str | None = None,
) -> Main:
    """Return the `main` of a command.

    After Ctrl-C it says what the same command would do next, if it `goes_on`.

    >>> main_of(lambda arguments: None)([])
    0
    """

    def main(arguments: Sequence[str] | None = None) -> int:
        try:
            return command(sys.argv[1:] if arguments is None else arguments) or 0
        except (BadInput, NoFeasiblePlan, Failed) as error:
            print(f"error\n{error}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt:
            if goes_on is None:
                print("interrupted", file=sys.stderr)
            else:
                print(f"interrupted; the same command {goes_on}")
            return 1

    return main
