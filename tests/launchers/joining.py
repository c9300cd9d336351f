# SPDX-License-Identifier: Apache-2.0
"""Machines that join a run on loopback, with the commands that the run printed."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Told:
    """The command that a run printed for one node."""

    words: list[str]
    token_file: Path

    def but(self, option: str, value: str) -> list[str]:
        """Return the words with another value of an option."""
        at = self.words.index(option)
        return [*self.words[: at + 1], value, *self.words[at + 2 :]]

    @property
    def token(self) -> str:
        return self.token_file.read_text()

    @property
    def address(self) -> str:
        return self.words[self.words.index("--join") + 1]

    @property
    def fingerprint(self) -> str:
        return self.words[self.words.index("--fingerprint") + 1]


def told(run_dir: Path) -> dict[str, Told]:
    """Return what a run's last start printed, by node; empty before that."""
    file = run_dir / "join" / "commands.txt"
    found = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        hetjax, *words, sign, token = shlex.split(line)
        assert (hetjax, sign) == ("hetjax", "<")
        node = words[words.index("--node") + 1]
        found[node] = Told(words=words, token_file=Path(token))
    return found


def joining(
    words: list[str], token: str, output: Path, prefix: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start `hetjax worker` with the token as input, and append its output to the file.

    The words of `prefix` precede its own.
    """
    with output.open("a") as file:
        child = subprocess.Popen(
            [*prefix, sys.executable, "-m", "hetjax", *words],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            text=True,
            start_new_session=True,
        )
    assert child.stdin is not None
    child.stdin.write(token)
    child.stdin.close()
    return child
